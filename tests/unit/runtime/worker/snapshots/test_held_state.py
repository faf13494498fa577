"""What one worker holds, another one takes over: values, what shares memory, and what cannot be copied."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from moreh_ap.errors import NotComputedError
from moreh_ap.parallelizer.mesh import Axis, Position
from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.protocol.messages.snapshots import STILL_OPEN
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.runtime.worker.commands.tables import Tables
from moreh_ap.runtime.worker.row_shard_store import RowShard
from moreh_ap.runtime.worker.snapshots import held_state
from moreh_ap.runtime.worker.snapshots.copied_parts import Part
from moreh_ap.runtime.worker.snapshots.held_state import CannotBeHeld, describe, take_over

ALONE = Axis(0, 1, None)
POSITION = Position(*[ALONE] * 5)
NORM, VIEW = StateRef("model0", "temporary", "1"), StateRef("model0", "temporary", "2")


def tables() -> Tables:
    return Tables(0, 1, "cpu")


def moved(before: Tables) -> Tables:
    after = tables()
    description, memory = describe(before)
    take_over(after, lambda rank: (description, [one.clone() for one in memory]))
    return after


def test_tensors_come_back_with_their_form_and_what_shares_memory_goes_on_sharing_it():
    before = tables()
    whole = torch.randn(4, 6).t()
    before.temporaries[NORM] = StateShard(whole, POSITION)
    before.temporaries[VIEW] = StateShard(whole[1:3], POSITION)
    before.row_shards[5] = RowShard(torch.randn(3).bfloat16(), ALONE, 3, True, torch.float32)
    before.row_shards[6] = None
    after = moved(before)
    found, view = after.temporaries[NORM].tensor, after.temporaries[VIEW].tensor
    assert torch.equal(found, whole) and found.stride() == whole.stride()
    found[2] = 7.0
    assert torch.equal(view, found[1:3]) and not torch.equal(view, whole[1:3])
    shard = after.row_shards[5]
    assert torch.equal(shard.content, before.row_shards[5].content) and shard.promised is torch.float32
    assert after.row_shards[6] is None


def test_a_copy_alone_leaves_out_what_is_divided_which_is_an_error_where_it_is_read():
    before = tables()
    before.note_error(MemoryError("of this one"))
    before.temporaries[NORM] = StateShard(torch.randn(3), POSITION)
    before.row_shards[5] = RowShard(torch.randn(3), Axis(1, 2, None), 6, True, torch.float32)
    before.row_shards[6] = RowShard(torch.randn(3), Axis(1, 2, None), None, True, torch.float32)
    divided = SimpleNamespace(kinds=["const", "rows"], shapes=[1, torch.randn(3)])
    before.calls = {1: SimpleNamespace(is_past=True, run=divided)}
    description, memory = describe(before, is_alone=True)
    after = tables()
    take_over(after, lambda rank: (description, memory))
    assert list(after.row_shards) == [6] and list(after.calls) == [] and NORM in after.temporaries
    with pytest.raises(NotComputedError, match="had raised MemoryError: of this one"):
        after.row_shards[5]


def test_a_part_of_a_tensor_is_no_copy_alone(monkeypatch):
    part = Part((4,), (), torch.float32, 0, (2,), (1,))
    monkeypatch.setattr(held_state, "parts_of", lambda of: {NORM: part})
    with pytest.raises(CannotBeHeld, match="each worker has a part of the parameters"):
        describe(tables(), is_alone=True)


def test_random_streams_lists_and_errors_come_along():
    before = tables()
    before.lists[3] = (NORM, VIEW)
    before.note_error(ValueError("a batch"))
    torch.manual_seed(5)
    description, memory = describe(before)
    expected = torch.rand(2)
    torch.manual_seed(6)
    after = tables()
    take_over(after, lambda rank: (description, memory))
    assert torch.equal(torch.rand(2), expected)
    assert after.lists == {3: (NORM, VIEW)} and str(after.missing("x")) == str(before.missing("x"))


@pytest.mark.parametrize(
    "content, why",
    [
        (lambda: 0, "lambda"),
        (torch.nn.Linear(1, 1), "a Linear of no model"),
        (torch.sparse_coo_tensor(size=(2, 2), check_invariants=False), "layout torch.sparse_coo"),
        (torch.randn(2, dtype=torch.complex64).conj(), "a tensor of class Tensor"),
    ],
)
def test_what_cannot_be_copied_says_what_it_is(content, why):
    before = tables()
    before.row_shards[1] = RowShard(content, ALONE, None, True, torch.float32)
    with pytest.raises(CannotBeHeld, match=why):
        describe(before)


def test_a_call_that_waits_for_its_backward_cannot_be_copied():
    before = tables()
    before.calls = {1: SimpleNamespace(is_past=False)}
    with pytest.raises(CannotBeHeld, match=STILL_OPEN):
        describe(before)


@pytest.mark.parametrize("rank, here, next_host", [(0, None, 2), (1, 0, 2), (2, None, 0), (3, 2, 0)])
def test_what_is_equal_on_several_is_once_on_each_host_and_does_not_travel(monkeypatch, rank, here, next_host):
    """Four workers on two hosts, with copies of one another's parameter and something of their own."""
    monkeypatch.setattr(held_state, "workers_of_a_host", lambda: 2)
    monkeypatch.setattr(held_state, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    before, shard = Tables(rank, 4, "cpu"), SimpleNamespace(copies=Axis(rank, 4, None))
    common, own = torch.arange(3.0), torch.tensor([float(rank)])
    name = ("state", "optimizer0", "0", "exp_avg")
    monkeypatch.setattr(held_state, "_states", lambda tables: {name: (common, shard)})
    before.temporaries[NORM] = StateShard(own, POSITION)
    copy = describe(before)
    held = pickle.loads(copy[0])
    place = held.place_of[name]
    assert held.elsewhere == ({} if here is None else {place: (here, name)})
    assert held.beside == {place: (next_host, name)}
    assert copy[1][place].numel() == (12 if here is None else 0)
    there = held_state.for_next_host(*copy)
    assert pickle.loads(there[0]).elsewhere == {place: (next_host, name)} and there[1][place].numel() == 0
    monkeypatch.setattr(held_state, "_states", lambda tables: {name: (common + 1, shard)})
    other = describe(Tables(next_host, 4, "cpu"))
    _, memory = held_state.whole(rank, lambda one: {rank: there, next_host: other}[one])
    assert torch.equal(memory[place].view(torch.float32), common + 1), "the other one's"
    after = Tables(rank, 4, "cpu")
    take_over(after, lambda one: {rank: there, next_host: other}[one])
    assert torch.equal(after.temporaries[NORM].tensor, own)
