"""What a trial run puts back outside of the model."""

from __future__ import annotations

import collections
import types

import torch
from torch import nn

from moreh_ap.parallelizer.trial.outside_state import outside_restored

COUNT, LOG, QUEUE, MEAN = 0, [1], collections.deque([1], maxlen=3), torch.zeros(2)
STATE, GENERATOR = types.SimpleNamespace(count=0, seen=[]), torch.Generator()


class Net(nn.Module):
    def forward(self, x):
        global COUNT
        COUNT += 1
        LOG.append(len(LOG))  # what nothing reads stays as it is
        QUEUE.append(len(QUEUE))
        MEAN.add_(1)
        STATE.count += 1
        STATE.seen.append(1)
        return x + torch.rand(2, generator=GENERATOR)


class Counter:
    def __init__(self):
        self.num_calls = 0

    def hook(self, module, args, output):
        self.num_calls += 1


def test_variables_and_what_hooks_keep_are_put_back():
    model, counter, log = Net(), Counter(), LOG
    model.register_forward_hook(counter.hook)
    drawn = []
    for _ in range(2):
        with outside_restored(model):
            drawn.append(model(torch.zeros(2)))
            assert (COUNT, STATE.count, counter.num_calls) == (1, 1, 1)
    assert (COUNT, LOG, list(QUEUE), MEAN.tolist()) == (0, [1], [1], [0.0, 0.0]) and LOG is log
    assert (STATE.count, STATE.seen, counter.num_calls) == (0, [], 0)
    assert torch.equal(*drawn)
