"""Trains a model whose workers run out of memory where the argument says, and prints its losses as JSON.

    python out_of_memory.py WHERE [LIMIT]

WHERE is "never" (and no accelerator), or one of "forward", "backward", "step", "later", "given", "tuned": the place, or
the way in which the plan is chosen. A worker runs out if it was given more than LIMIT rows at once; in "backward", the
second worker alone.
"""

import json
import os
import sys

import torch
from torch import nn

WHERE, LIMIT = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
ROWS, LENGTH, WIDTH = 8, 2048, 32
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB."


def takes_too_much(x: torch.Tensor) -> bool:
    """Whether this is a worker in the middle of a training step, and the piece of the batch is too large for it."""
    is_training = type(x) is torch.Tensor and torch.is_grad_enabled()
    return "MOREH_AP_WORKER" in os.environ and is_training and x.shape[0] > LIMIT


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.too_much = os.environ.get("MOREH_AP_WORKER") == "1" and x.shape[0] > LIMIT
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.too_much:
            raise torch.OutOfMemoryError(MESSAGE)
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 128), nn.Linear(128, 1)
        self.num_steps = 0

    def forward(self, x, y):
        if takes_too_much(x):
            self.num_steps += 1
            sys.modules["torch"].rows_too_many = x.shape[0]  # for the optimizer, which comes to a worker by itself
            if WHERE in ("forward", "given", "tuned") or (WHERE == "later" and self.num_steps > 3):
                raise torch.OutOfMemoryError(MESSAGE)
        hidden = torch.tanh(self.first(x))
        if WHERE == "backward":
            hidden = FailsInBackward.apply(hidden)
        return ((self.second(hidden) - y) ** 2).mean()


class Optimizer(torch.optim.AdamW):
    """Fails in its first step on workers that were told to make a model of whole batches."""

    def step(self, closure=None):
        if WHERE == "step" and hasattr(torch, "rows_too_many") and not self.state:
            raise torch.OutOfMemoryError(MESSAGE)
        return super().step(closure)


def main() -> None:
    if WHERE != "never":
        plan = "replicate=2" if WHERE == "given" else None
        torch.moreh.option.enable_advanced_parallelization(
            devices=2, mixed_precision=False, plan=plan, autotune=WHERE == "tuned"
        )
    torch.manual_seed(0)
    model = Model()
    batches = [(torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, LENGTH, 1)) for _ in range(6)]
    if WHERE != "never":
        model = model.cuda()
    optimizer = Optimizer(model.parameters(), lr=1e-2)
    losses, errors = [], []
    for x, y in batches:
        if WHERE != "never":
            x, y = x.cuda(), y.cuda()
        try:
            loss = model(x, y)
            loss.backward()
            loss.item()  # from the second step on an error comes with what is read first
        except torch.OutOfMemoryError as error:
            errors.append(str(error))
            if WHERE == "later":
                break
            optimizer.zero_grad()
            loss = sum(model(x[i : i + 2], y[i : i + 2]) / 4 for i in range(0, ROWS, 2))  # as one does by hand
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(json.dumps({"losses": losses, "errors": errors}))


if __name__ == "__main__":
    main()
