"""A model of the user's own with dropout, a buffer and a counted forward, trained under the plan in argv.

Prints the losses, what the script can see of a verification, and whether its random stream was left alone.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(hidden), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Own(nn.Module):
    def __init__(self, vocabulary=50, hidden=32, blocks=6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(blocks))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.num_layers = blocks
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids, targets):
        x = self.embedding(ids) * self.scale
        for index in range(self.num_layers):
            x = self.blocks[index](x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    torch.moreh.option.enable_advanced_parallelization(plan=sys.argv[1], mixed_precision=False)
    torch.manual_seed(0)
    forward = Own.forward
    model = Own().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.get_rng_state()
    for step in range(2):
        ids = torch.arange(6 * 9).view(6, 9).add(step).remainder(50).cuda()
        loss = model(ids, ids.roll(1, 1))[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
    print("undisturbed", torch.equal(before, torch.get_rng_state()), Own.forward is forward)
    print("peak", torch.cuda.max_memory_allocated() > 0)


if __name__ == "__main__":
    main()
