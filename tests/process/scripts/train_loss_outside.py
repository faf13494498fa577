"""A script that computes its loss outside of the model; its forward counts the tensors as large as logits."""

import gc
import sys

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, KIND = int(sys.argv[1]), sys.argv[2]
if len(sys.argv) > 3:
    torch.moreh.option.enable_advanced_parallelization(plan=sys.argv[3], mixed_precision=False)

ROWS, WIDTH = 16, 8
POSITIONS = 2**20 // VOCABULARY


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        there = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.device.type != "meta"]
        large = {one.untyped_storage().data_ptr() for one in there if one.numel() >= ids.numel() * VOCABULARY}
        print("large", len(large))
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return self.head(hidden)


def loss_of(logits, labels):
    scores, labels = logits[:, :-1].float(), labels[:, 1:]
    if KIND == "plain":
        return F.cross_entropy(scores.reshape(-1, VOCABULARY), labels.reshape(-1))
    scores = 4 * torch.tanh(scores / 4)
    if KIND == "smoothed":
        scores = scores.reshape(-1, VOCABULARY)
        loss = F.cross_entropy(scores, labels.reshape(-1), label_smoothing=0.1, ignore_index=3)
        return loss + 1e-3 * scores.logsumexp(-1).pow(2).mean()
    each = F.cross_entropy(scores.reshape(-1, VOCABULARY), labels.reshape(-1), reduction="none").view(labels.shape)
    return (each * (labels > 100)).sum() / (labels > 100).sum()


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Speaker().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
for _ in range(2):
    first, second, labels = torch.randint(0, VOCABULARY, (3, ROWS, POSITIONS)).to(device)
    loss = F.cross_entropy(model(first).view(-1, VOCABULARY), labels.view(-1), ignore_index=3)
    logits = model(second)  # its forward sees what the loss has left on the worker
    loss = loss + loss_of(logits, labels)
    del logits
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"loss {loss.item():.6f} norm {norm.item():.6f}")
    del loss  # with it, all that the step has kept
