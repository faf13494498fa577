"""What is said of a loss that is not finite in the part of one worker alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moreh_ap.protocol.messages.tensors import LeafReply, bytes_of
from moreh_ap.session.calls.lone_losses import LoneLosses

NAN, INF = float("nan"), float("inf")


def joined(watch: LoneLosses, *parts: float, kind: str = "share") -> torch.Tensor:
    replies = [LeafReply(kind, (), torch.float32, True, bytes_of(torch.tensor(part))) for part in parts]
    return LeafReply.join(replies, watch.look_at)


def watch_of(num_devices: int) -> LoneLosses:
    return LoneLosses(SimpleNamespace(num_devices=num_devices))


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_the_worker_is_named_whose_part_alone_is_not_finite_once(capsys, wrong):
    watch = watch_of(3)
    for _ in range(2):
        assert not joined(watch, 1.0, wrong, 2.0).isfinite()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[warning] a loss is not finite, and of its parts only that of worker 1: ")
    joined(watch, wrong, 1.0, 2.0)
    assert "worker 0" in capsys.readouterr().out


def test_where_several_workers_have_one_part_the_part_is_named(capsys):
    joined(watch_of(4), 1.0, NAN)
    assert "only part 2 of 2 of the batch" in capsys.readouterr().out


@pytest.mark.parametrize("parts", [(1.0, 2.0), (NAN, NAN), (INF, -INF), (NAN,)])
def test_finite_losses_and_those_that_are_nan_everywhere_are_not_worth_a_line(capsys, parts):
    joined(watch_of(len(parts)), *parts)
    assert capsys.readouterr().out == ""
