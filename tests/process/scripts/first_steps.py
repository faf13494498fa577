"""Trains a network whose numbers differ on several devices where its argument says so; prints losses.

first_steps.py [--plan PLAN] [--wrong forward|backward|statistics|alone] [--optimizer adamw|own] [--dropout P]
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn


def num_devices():
    """Returns 2 in the workers, 1 in the one that computes alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Scale(torch.autograd.Function):
    """Returns its input; its gradient grows with the number of devices."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (0.9 + 0.1 * num_devices())


class Block(nn.Module):
    def __init__(self, wrong, dropout):
        super().__init__()
        self.wrong = wrong
        self.linear, self.dropout = nn.Linear(48, 48), nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.wrong == "alone" and num_devices() == 1:
            raise ValueError("one device is not enough")
        if self.wrong == "statistics" and self.training:
            self.seen += num_devices()
        y = self.linear(x)
        if self.wrong == "forward":
            y = y * (0.99 + 0.01 * num_devices())
        if self.wrong == "backward":
            y = Scale.apply(y)
        return x + self.dropout(F.gelu(y))


class Net(nn.Module):
    def __init__(self, wrong, dropout):
        super().__init__()
        self.blocks = nn.ModuleList([Block(wrong if number == 2 else "", dropout) for number in range(4)])
        self.head = nn.Linear(48, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OwnOptimizer(torch.optim.Optimizer):
    """Gradient descent with steps that depend on the norm of each gradient, so that it is no step of elements."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad / (parameter.grad.norm() + 1), alpha=-group["lr"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", default="replicate=2")
    parser.add_argument("--wrong", default="")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--dropout", type=float, default=0.1)
    arguments = parser.parse_args()
    torch.moreh.option.enable_advanced_parallelization(plan=arguments.plan)
    torch.manual_seed(0)
    model = Net(arguments.wrong, arguments.dropout).cuda()
    make = {"adamw": torch.optim.AdamW, "own": OwnOptimizer}[arguments.optimizer]
    optimizer = make(model.parameters(), lr=1e-2)
    for _ in range(3):
        x, y = torch.randn(16, 48).cuda(), torch.randint(0, 8, (16,)).cuda()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
