"""Results of workers, put together; with one worker, whose result is all there is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moreh_ap.parallelizer.items.item_results import Merge, TogetherWith, gathered
from moreh_ap.parallelizer.mesh import world_axis


@pytest.fixture
def axis(monkeypatch):
    monkeypatch.setattr(dist, "all_gather_object", lambda found, sent, group: found.__setitem__(0, sent))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    return world_axis()


def test_lists_and_shares(axis):
    merge = Merge("node", (Merge("items"), Merge("share")))
    result = {"found": [{"boxes": torch.ones(2, 4), "name": "first"}], "loss": torch.tensor(1.0)}
    together = TogetherWith(merge, result, 1)
    assert not together.problem
    whole, kinds = together.put_together(axis)
    assert kinds == ["same", "const", "share"] and whole["found"][0]["name"] == "first"
    assert TogetherWith(merge, result, 2).problem == "items decide how the result nests"


def test_gradients_come_back(axis):
    own = torch.arange(3.0, requires_grad=True)
    ((number, same),) = gathered([torch.tensor(4), own * 2], axis)
    (same * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert number == 4 and own.grad is not None and own.grad.tolist() == [2, 4, 6]
