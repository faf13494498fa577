"""What workers held under one plan is put together and divided anew under another; what cannot be says why."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moreh_ap.parallelizer.mesh import Axis, Position
from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.parallelizer.state.tensor_layout import TensorLayout
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.runtime.worker.commands.tables import Tables
from moreh_ap.runtime.worker.row_shard_store import RowShard
from moreh_ap.runtime.worker.snapshots import held_state
from moreh_ap.runtime.worker.snapshots.held_state import describe
from moreh_ap.runtime.worker.snapshots.other_plan import _call, take_over_from_all, why_bound

WEIGHT, NORM = StateRef("session", "temporary", "1"), StateRef("session", "temporary", "2")
WHOLE, LOGITS = torch.arange(12.0).reshape(4, 3), torch.randn(5, 2)


@pytest.fixture(autouse=True)
def on_one_machine(monkeypatch):
    monkeypatch.setattr(held_state, "workers_of_a_host", lambda: 2)


def position(rank: int, size: int) -> Position:
    alone, tensor = Axis(0, 1, None), Axis(rank, size, None)
    return Position(alone, alone, tensor, alone, alone)


def one_of_two(rank: int) -> Tables:
    """A worker that has rows 0 and 3 of a tensor, or rows 1 and 2, and its rows of a result."""
    tables = Tables(rank, 2, "cpu")
    ranges = ((0, 1), (3, 4)) if rank == 0 else ((1, 3),)
    local = torch.cat([WHOLE[start:stop] for start, stop in ranges])
    layout = TensorLayout((4, 3), 0, ranges)
    tables.temporaries[WEIGHT] = StateShard(local, position(rank, 2), layout)
    tables.temporaries[NORM] = StateShard(torch.tensor(2.5), position(rank, 2))
    rows = LOGITS[:3] if rank == 0 else LOGITS[3:]
    tables.row_shards[7] = RowShard(rows.clone(), Axis(0, 1, None), 5, True, torch.float32)
    tables.row_shards[8] = None
    tables.lists[3] = (WEIGHT, NORM)
    return tables


def taken_over(*before: Tables) -> Tables:
    copies = [describe(one) for one in before]
    after = Tables(0, 1, "cpu")
    take_over_from_all(after, lambda rank: (copies[rank][0], [one.clone() for one in copies[rank][1]]), len(before))
    for _, memory in copies:
        for one in memory:
            one.zero_()  # the copies are overwritten by the next ones
    return after


def test_tensors_of_which_workers_have_parts_are_whole_again():
    torch.manual_seed(3)
    after = taken_over(one_of_two(0), one_of_two(1))
    held = after.temporaries[WEIGHT]
    assert torch.equal(held.tensor, WHOLE) and held.layout is None and held.shape == (4, 3)
    assert after.temporaries[NORM].tensor.item() == 2.5
    assert after.lists == {3: (WEIGHT, NORM)}


def test_rows_are_joined_and_divided_anew_and_nothing_lies_in_the_copies():
    torch.manual_seed(3)
    after = taken_over(one_of_two(0), one_of_two(1))
    shard = after.row_shards[7]
    assert torch.equal(shard.tensor, LOGITS) and shard.rows == 5
    assert after.row_shards[8] is None


def test_random_streams_are_those_of_the_first_worker():
    torch.manual_seed(5)
    first = describe(one_of_two(0))
    expected = torch.rand(2)
    torch.manual_seed(6)
    second = describe(one_of_two(1))
    take_over_from_all(Tables(0, 1, "cpu"), lambda rank: (first, second)[rank], 2)
    assert torch.equal(torch.rand(2), expected)


def model(**otherwise):
    known = {"gradients_aside": None, "parameters": {"weight": torch.zeros(2)}, "attributes_since_made": dict}
    plan = SimpleNamespace(tensor=1, pipeline=1)
    return SimpleNamespace(**{**known, "plan": plan, **otherwise})


@pytest.mark.parametrize(
    "otherwise, why",
    [
        ({"gradients_aside": {}}, "kept aside"),
        ({"parameters": {"packed": torch.zeros(2, dtype=torch.uint8)}}, "packed bytes"),
        ({"attributes_since_made": lambda: {"cache": [torch.zeros(1)]}}, "has set cache to something else"),
        ({"attributes_since_made": lambda: {"times": 3, "name": "x"}}, ""),
        ({}, ""),
    ],
)
def test_what_depends_on_the_plan_says_so(otherwise, why):
    tables = Tables(0, 2, "cpu")
    tables.models["model0"] = model(**otherwise)
    found = why_bound(tables)
    assert why in found and bool(found) is bool(why)


def test_results_of_a_model_whose_layers_are_split_and_views_stay():
    tables = one_of_two(0)
    assert why_bound(tables) == ""
    tables.models["model0"] = model(plan=SimpleNamespace(tensor=2, pipeline=1))
    assert "layers are split" in why_bound(tables)
    tables.row_shards.clear()
    tables.temporaries.clear()
    tables.calls = {5: SimpleNamespace(input_gradients={})}
    assert why_bound(tables) == "", "outputs of which workers have parts are put together"
    tables.models["model0"] = model(plan=SimpleNamespace(tensor=1, pipeline=2))
    assert why_bound(tables) == "", "outputs that one stage has are divided anew"
    tables = one_of_two(0)
    base = tables.row_shards[7].content
    tables.row_shards[9] = RowShard(base[1:], Axis(0, 1, None), 5, True, torch.float32)
    assert "views" in why_bound(tables)


def call(rank: int, *outputs: torch.Tensor) -> SimpleNamespace:
    """A call on one of four workers that split layers in pairs: logits by vocabulary, and its share of the loss."""
    kinds, shapes = ("rows", "share", "rows"), (torch.empty(2, 6), torch.empty(()), None)
    run = SimpleNamespace(outputs=[*outputs, "a constant"], kinds=kinds, shapes=shapes, inputs=(), has_result=True)
    run.runs_in_stages = False
    roles = SimpleNamespace(axis=Axis(0, 1, None), rows=4)
    model = SimpleNamespace(applied=SimpleNamespace(position=position(0, 1)))
    return SimpleNamespace(run=run, roles=roles, model=model, answers=rank % 2 == 0)


def test_results_of_which_workers_of_a_tensor_axis_have_parts_are_put_together_once():
    logits, losses = torch.randn(4, 6), torch.tensor([0.5, 0.25])
    calls = [call(rank, logits[rank // 2 * 2 :][:2, rank % 2 * 3 :][:, :3], losses[rank // 2]) for rank in range(4)]
    moved = _call(calls, torch.device("cpu"))
    assert torch.equal(moved.run.outputs[0], logits) and moved.run.outputs[1].item() == 0.75
    assert moved.run.outputs[2] == "a constant" and moved.run.shapes[0].shape == (4, 6)
    assert moved.answers and calls[0].run.outputs[0].shape == (2, 3), "the copy stays"


@pytest.mark.parametrize("stage, stages, num_rows", [(0, 1, 4), (0, 2, 0), (1, 2, 4)])
def test_results_that_one_stage_has_are_those_of_the_last_stage_or_of_all(stage, stages, num_rows):
    logits, losses = torch.randn(4, 6), torch.tensor([0.5, 0.25])
    first_stage = [call(rank) for rank in range(2)]
    last_stage = [call(rank, logits[2 * rank :][:2], losses[rank]) for rank in range(2)]
    for one in first_stage:
        one.run.outputs, one.run.has_result, one.answers = (), False, False
    for one in last_stage:
        one.answers = True
    for one in (*first_stage, *last_stage):
        one.run.runs_in_stages = True
        one.model.applied.position = replace(position(0, 1), pipeline=Axis(stage, stages, None))
    moved = _call([*first_stage, *last_stage], torch.device("cpu"))
    assert moved.answers == moved.run.has_result == (num_rows > 0) and len(moved.run.outputs) == (3 if num_rows else 0)
    if num_rows:
        assert torch.equal(moved.run.outputs[0], logits) and moved.run.outputs[1].item() == 0.75
    assert last_stage[0].run.has_result and not first_stage[0].run.has_result, "the copies stay"


def test_of_the_workers_of_a_new_tensor_axis_one_answers():
    calls = [call(rank, torch.zeros(2, 6), torch.tensor(0.0)) for rank in range(2)]
    for one in calls:
        one.model.applied.position = position(1, 2)
    assert not _call(calls, torch.device("cpu")).answers
