"""Workers agree on how a trial went: here each is alone."""

from __future__ import annotations

import torch
from torch import nn

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.trial.agreement import everywhere, worst

CALL = Call(nn.Linear(1, 1), "unsplit", torch.device("cpu"), axis=Axis(0, 1, None))


def test_a_single_worker_agrees_with_itself():
    assert everywhere(True, CALL) and not everywhere(False, CALL)
    assert worst(3, CALL) == 3
