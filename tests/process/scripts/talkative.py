"""Errors and output of the model itself, which runs elsewhere, as the script meets them."""

import torch
from torch import nn


class Odd(LookupError):
    """An exception class of the script's own."""


class Talkative(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, ids):
        if ids.shape[1] == 5:
            raise Odd("five is odd")
        if ids.shape[1] == 6:
            print("forward says hello")
        return self.last(self.words(ids)).mean()


torch.moreh.option.enable_advanced_parallelization(plan="replicate=2")
model = Talkative().cuda()
model(torch.ones(4, 6, dtype=torch.long).cuda()).item()
print("after the forward")


def attempt(ids):
    try:
        loss = model(ids.cuda())
        loss.backward()
        print("read", loss.item())
    except Exception as error:
        print(f"caught {type(error).__name__}: {error}")


attempt(torch.ones(4, 3, dtype=torch.long))
attempt(torch.full((4, 3), 10))  # a shape that was seen before: nothing waits in the forward
attempt(torch.ones(4, 5, dtype=torch.long))
attempt(torch.ones(4, 3, dtype=torch.long))
model(torch.ones(4, 5, dtype=torch.long).cuda())  # the line that fails
