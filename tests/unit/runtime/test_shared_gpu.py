"""Several workers on one GPU: how devices are dealt, and messages by way of host memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moreh_ap.accelerator import worker_starts
from moreh_ap.runtime.shared_gpu import StagedWork, gathered
from moreh_ap.runtime.worker_environment import SHARING_VARIABLE, device_ids


def test_devices_are_dealt_in_turn(monkeypatch):
    monkeypatch.setenv(SHARING_VARIABLE, "2")
    assert device_ids(4, "4,6") == ("4", "4", "6", "6")
    assert device_ids(4, "") == ("0", "0", "1", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert worker_starts.resolve_devices(2) == ("cuda", 2)


def test_without_the_variable_each_worker_has_one_of_its_own(monkeypatch):
    monkeypatch.delenv(SHARING_VARIABLE, raising=False)
    assert device_ids(2, "4,6") == ("4", "6")


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_message_arrives_where_it_was_wanted(is_staged):
    sent, wanted = torch.arange(4.0), torch.zeros(4)
    seen = []

    def transfer(tensor, **where):
        seen.append((tensor, where))
        return SimpleNamespace(wait=lambda: tensor.copy_(sent) is tensor, is_completed=lambda: True)

    operation = SimpleNamespace(op=transfer, tensor=wanted, group=None, tag=3, group_peer=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "irecv", transfer)
        work = StagedWork(operation, lambda tensor: is_staged)
        assert work.wait() and work.is_completed()
    assert torch.equal(wanted, sent)
    ((given, where),) = seen
    assert (given is wanted) != is_staged and where == {"group": None, "tag": 3, "group_src": 1}


def test_a_gather_puts_members_one_behind_the_other_in_any_dim(monkeypatch):
    def all_gather(parts, own, group):
        assert own.is_contiguous() and all(part.is_contiguous() for part in parts)
        for number, part in enumerate(parts):
            part.copy_(own + 10 * number)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    own = torch.arange(6.0).view(3, 2).t()
    whole = gathered(own, 1, SimpleNamespace(size=lambda: 2))
    assert torch.equal(whole, torch.cat([own, own + 10], 1))
