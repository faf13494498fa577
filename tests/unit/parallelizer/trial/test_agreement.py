"""Workers agree on how a trial went: here each is alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.trial import agreement
from moreh_ap.parallelizer.trial.agreement import everywhere, together_or_not, worst
from moreh_ap.parallelizer.trial.dry_run import Refused

CALL = Call(nn.Linear(1, 1), "unsplit", torch.device("cpu"), axis=Axis(0, 1, None))


def test_a_single_worker_agrees_with_itself():
    assert everywhere(True, CALL) and not everywhere(False, CALL)
    assert worst(3, CALL) == 3


class _Sum:
    """A sum that others come to at the third look, or never."""

    def __init__(self, largest: torch.Tensor, comes: bool) -> None:
        self._largest, self._comes, self._looks = largest, comes, 0

    def is_completed(self) -> bool:
        self._looks += 1
        return self._comes and self._looks > 2

    def wait(self) -> None:
        self._largest.fill_(5)


@pytest.mark.parametrize("comes", [True, False])
def test_a_worker_that_is_alone_with_an_error_does_not_wait_for_ever(monkeypatch, comes):
    monkeypatch.setattr(agreement, "is_initialized", lambda: True)
    monkeypatch.setattr(agreement, "get_world_size", lambda: 2)
    monkeypatch.setattr(agreement, "ALONE_S", 30.0 if comes else 0.0)
    monkeypatch.setattr(agreement.dist, "all_reduce", lambda largest, op, async_op: _Sum(largest, comes))
    error = FileNotFoundError("words.txt")
    if comes:
        assert worst(3, CALL, error) == 5
    else:
        with pytest.raises(FileNotFoundError):
            everywhere(False, CALL, error)


def test_what_one_could_not_run_none_goes_on_with(monkeypatch):
    assert together_or_not(lambda: 7, CALL) == 7
    with pytest.raises(KeyError):
        together_or_not({}.popitem, CALL)
    monkeypatch.setattr(agreement, "worst", lambda number, call, error: 1)
    with pytest.raises(Refused, match="another worker"):
        together_or_not(lambda: 7, CALL)
