"""A model with a large vocabulary, whose forward computes the loss and says which copies of the logits it keeps."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

if len(sys.argv) > 1:
    torch.moreh.option.enable_advanced_parallelization(plan=sys.argv[1], mixed_precision=False)

ROWS, POSITIONS, VOCABULARY, WIDTH = 16, 64, 2**14, 8


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, labels):
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        logits = self.head(hidden).view(-1, VOCABULARY)
        copies = set()

        def keep(tensor):
            if tensor.numel() == logits.numel() and tensor.data_ptr() != logits.data_ptr():
                copies.add(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = F.cross_entropy(logits, labels.view(-1), ignore_index=3)
        print("copies", len(copies))
        return loss


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Speaker().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
for _ in range(2):
    ids, labels = torch.randint(0, VOCABULARY, (2, ROWS, POSITIONS)).to(device)
    loss = model(ids, labels)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"loss {loss.item():.6f} norm {norm.item():.6f}")
