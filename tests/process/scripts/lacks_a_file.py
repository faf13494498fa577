"""A block of the model reads a file that one of two hosts lacks, while their workers share its parameters."""

from pathlib import Path

import torch
from torch import nn

from moreh_ap.parallelizer.trial import agreement


class Block(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.reads, self.linear = reads, nn.Linear(8, 8)

    def forward(self, x):
        if self.reads and Path("/proc/self/comm").read_text().strip() == "moreh-worker-1":
            agreement.ALONE_S = 1.0
            Path("/nowhere/words.txt").read_text()
        return self.linear(x)


def main():
    torch.moreh.option.enable_advanced_parallelization(plan="shard=2", devices=2)
    model = nn.Sequential(*(Block(reads=number == 1) for number in range(4))).cuda()
    model(torch.ones(8, 8).cuda()).square().mean().backward()


if __name__ == "__main__":
    main()
