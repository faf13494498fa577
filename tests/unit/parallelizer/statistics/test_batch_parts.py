"""Which normalisations take statistics of parts of a batch, and what workers' running statistics make together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.parallelizer.statistics.batch_parts import BatchParts, Part, part_of, tensor_names, whole_parts

GHOST, ALL = Part("ghost.running_mean", "ghost.running_mean", "ghost.running_var"), Part("line 7")


@pytest.mark.parametrize(
    ("batch", "workers", "found"),
    [
        ({ALL: [8]}, [{ALL: [4]}, {ALL: [4]}], ()),
        ({GHOST: [4, 4]}, [{GHOST: [4]}, {GHOST: [4]}], (GHOST,)),
        ({ALL: [8], GHOST: [4, 4]}, [{ALL: [4], GHOST: [4]}, {ALL: [4], GHOST: [4]}], (GHOST,)),
        ({GHOST: [4, 4, 4]}, [{GHOST: [3, 3]}, {GHOST: [3, 3]}], None),
        ({GHOST: [4, 4]}, [{GHOST: [4]}, None], None),
        ({GHOST: [4, 4]}, [{GHOST: [4]}, {GHOST: [4], ALL: [4]}], None),
        ({ALL: [6, 9]}, [{ALL: [4, 9]}, {ALL: [2, 0]}], ()),  # of rows that a mask leaves
        ({}, [{}, {}], ()),
    ],
)
def test_sizes_tell_what_workers_have_whole(batch, workers, found):
    assert whole_parts(batch, workers) == found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ghost, self.plain = nn.BatchNorm1d(3, momentum=0.3), nn.BatchNorm1d(3, affine=False)


def arguments(norm: nn.BatchNorm1d) -> dict:
    return {
        "running_mean": norm.running_mean,
        "running_var": norm.running_var,
        "weight": norm.weight,
        "momentum": norm.momentum,
    }


def test_running_statistics_are_those_of_one_part_after_the_other():
    parts = torch.randn(4, 5, 3).split(1)
    torch.manual_seed(0)
    one, workers = Model(), [Model(), Model()]
    for part in parts:
        one.ghost(part[0])
    own = []
    for rank, model in enumerate(workers):
        names = tensor_names(model)
        shared = BatchParts([part_of(arguments(model.ghost), names)], model)
        for part in parts[rank * 2 : rank * 2 + 2]:
            assert shared.take(arguments(model.ghost)) and not shared.take(arguments(model.plain))
            model.ghost(part[0])
        own.append(shared)
    sent: list[torch.Tensor] = []

    def send(numbers: torch.Tensor) -> torch.Tensor:
        sent.append(numbers)
        raise InterruptedError

    for shared in own:
        with pytest.raises(InterruptedError):
            shared.put_together(send)
    for shared, model in zip(own, workers, strict=True):
        shared.put_together(lambda numbers: torch.stack(sent))
        for name, value in one.ghost.named_buffers():
            torch.testing.assert_close(getattr(model.ghost, name), value)
