"""Which elements of a tensor each worker writes: all workers together every element once, copies in equal parts."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.parallelizer.mesh import Axis, Position
from moreh_ap.parallelizer.state.checkpoint_shards import boxes_of
from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.parallelizer.state.tensor_layout import TensorLayout, shard_range

ONE = Axis(0, 1, None)


def written(whole: torch.Tensor, shards: list[StateShard]) -> list[int]:
    """Returns how many elements each worker writes of a tensor, after checking that all of them are there once."""
    told, count = torch.full_like(whole, -1), []
    for shard in shards:
        boxes = boxes_of({"weight": shard})
        for box in boxes:
            place = tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
            assert (told[place] == -1).all(), f"{box.key} is written twice"
            told[place] = box.value()
        count.append(sum(box.value().numel() for box in boxes))
    torch.testing.assert_close(told, whole, rtol=0, atol=0)
    return count


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(7, 64 * 1024), (5, 3, 64 * 1024), (2**19,), (1, 2**19)])
def test_copies_of_a_large_tensor_are_written_in_parts(shape, num_workers):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    shards = [
        StateShard(whole, Position(Axis(rank, num_workers, None), ONE, ONE, ONE, Axis(rank, num_workers, None)))
        for rank in range(num_workers)
    ]
    count = written(whole, shards)
    rows = -(-shape[0] // num_workers)
    assert max(count) == rows * whole[0].numel()


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (100, 100)])
def test_of_a_small_tensor_the_first_copy_is_written(shape):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    shards = [StateShard(whole, Position(Axis(rank, 2, None), ONE, ONE, ONE, Axis(rank, 2, None))) for rank in range(2)]
    assert written(whole, shards) == [whole.numel(), 0]


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_of_a_tensor_axis_are_divided_among_the_replicas(dim):
    whole = torch.arange(2.0**21).view(2**10, 2**11)
    shards = []
    for replica in range(2):
        for rank in range(2):
            start, stop = shard_range(whole.shape[dim], 2, rank)
            layout = TensorLayout(tuple(whole.shape), dim, ((start, stop),))
            position = Position(Axis(replica, 2, None), ONE, Axis(rank, 2, None), ONE, Axis(replica, 2, None))
            shards.append(StateShard(whole.narrow(dim, start, stop - start), position, layout))
    assert written(whole, shards) == [whole.numel() // 4] * 4


def test_a_copy_on_another_stage_or_tensor_rank_is_not_written():
    whole = torch.ones(2**20)
    copies = Axis(0, 2, None)
    for position, is_first in (
        (Position(copies, ONE, ONE, ONE, copies), False),
        (Position(copies, ONE, Axis(1, 2, None), ONE, copies), True),
    ):
        assert boxes_of({"weight": StateShard(whole, position, None, is_first)}) == []
