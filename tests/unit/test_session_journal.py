"""What is told again to other workers, and what a machine remembers of plans that ran out of memory."""

import json

import pytest
import torch

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.memory_footprint import MemoryEstimate
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.planning_task import Corrections
from moreh_ap.protocol.messages.calls import Differentiate, Forward
from moreh_ap.protocol.messages.state import RunOperation
from moreh_ap.protocol.messages.stream import Batch, Synchronize
from moreh_ap.protocol.messages.tensors import OutputRef, StateRef, TensorData
from moreh_ap.session import journal
from moreh_ap.session.outbox import Outbox, Restart
from moreh_ap.session.planning import oom_records
from moreh_ap.session.planning.autotune import plans_to_try
from moreh_ap.session.planning.step_watch import Expected
from moreh_ap.states import SessionState, StateMachine

GIB = 2**30


class Answer:
    """A reply that is there at once: one worker's results, or an error."""

    def __init__(self, commands, error=None):
        self.commands, self.error = commands, error

    def done(self):
        return True

    def exception(self):
        return self.error

    @property
    def group(self):
        return self

    def answers(self, reply):
        if self.error is not None:
            raise self.error
        return [[f"{type(command).__name__}" for command in self.commands]]

    def add_done_callback(self, callback):
        callback(self)


class Workers:
    """Stands for a mesh: notes what it is told; the message of number `fails_at` fails."""

    def __init__(self, fails_at=None):
        self.told, self.fails_at = [], fails_at

    def submit(self, batch: Batch):
        self.told.append(batch.commands)
        error = torch.OutOfMemoryError("no memory") if len(self.told) - 1 == self.fails_at else None
        return Answer(batch.commands, error)


def forward(*tensors):
    return Forward(1, 2, tensors, None, (False,) * len(tensors), True, 0, None, None, None, ())


def test_everything_since_opening_is_told_again_to_other_workers_and_its_promises_are_kept():
    first, second = Workers(fails_at=2), Workers()
    outbox = Outbox(first)
    outbox.on_error = lambda error: Restart(second, lambda command: command)
    outbox.submit(Synchronize())
    outbox.journal.open()
    told = []
    earlier = outbox.submit(forward())
    earlier.add_done_callback(lambda posted: told.append(posted.failed()))
    posted = outbox.submit(Synchronize())
    assert posted.failed()
    assert posted.result() == ["Synchronize"]
    assert second.told == first.told[1:], "what was told before the journal was opened is not told again"
    assert told == [False, False], "a callback hears of the second answer too"
    assert outbox.times_restarted == 1


def test_a_second_failure_is_met_as_well_and_an_error_of_nobodys_business_is_raised():
    meshes = [Workers(fails_at=0), Workers(fails_at=0), Workers()]
    outbox = Outbox(meshes[0])
    outbox.on_error = lambda error: Restart(meshes[1 + outbox.times_restarted], lambda command: command)
    outbox.journal.open()
    assert outbox.submit(Synchronize()).result() == ["Synchronize"]
    assert outbox.times_restarted == 2
    alone = Outbox(Workers(fails_at=0))
    alone.on_error = lambda error: None
    with pytest.raises(torch.OutOfMemoryError):
        alone.submit(Synchronize()).result()


def test_a_journal_closes_when_it_grows_too_large(monkeypatch):
    monkeypatch.setattr(journal, "_MOST_BYTES", 100)
    noted, closed = journal.Journal(StateMachine(SessionState.EMPTY)), []
    noted.open()
    noted.state.when_left(SessionState.REPLAYABLE, lambda: closed.append(True))
    noted.note((forward(TensorData.of(torch.zeros(20))),), ())
    assert noted.state.current is SessionState.REPLAYABLE and not closed
    noted.note((forward(TensorData.of(torch.zeros(20))),), ())
    assert noted.state.current is SessionState.UNREPLAYABLE and closed == [True] and noted.messages() == ()


def test_a_journal_knows_what_another_layout_would_break():
    noted = journal.Journal(StateMachine(SessionState.EMPTY))
    noted.open()
    noted.note((forward(TensorData.of(torch.zeros(2))),), ())
    assert not noted.is_bound_to_layout
    noted.note((forward(OutputRef(0, 0)),), ())
    assert noted.is_bound_to_layout
    noted.open()
    noted.note((RunOperation("aten::add.Tensor", (), {}, ()),), ())
    assert noted.is_bound_to_layout and not noted.differentiates_gradients
    noted.note((Differentiate(1, 0, (), (), (), ()),), ())
    assert noted.differentiates_gradients


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_out_of_memory_is_recognised(error, expected):
    assert oom_records.is_out_of_memory(error) is expected


def candidate(plan: str, gib: float = 10.0) -> Candidate:
    memory = MemoryEstimate(gib * GIB, 0, 0, 0, 0, 0, 2 * GIB)
    return Candidate(Plan.parse(plan), memory, 40.0 * GIB)


def test_a_plan_that_ran_out_limits_later_plans_of_the_same_model_and_batch(monkeypatch, tmp_path):
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    expected = Expected("here", "Model", 8, candidate("replicate=2", 20.0), Corrections(memory=2.0))
    oom_records.remember(expected, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"))
    limit = 2 * GIB + 0.9 * 20 * GIB
    assert oom_records.limit_of("here", "Model", 8, factor=2.0) == limit
    assert oom_records.limit_of("here", "Model", 16, factor=1.0) == limit / 2
    assert oom_records.limit_of("here", "Model", 7, factor=1.0) == float("inf")
    assert oom_records.limit_of("here", "Another", 8, factor=1.0) == float("inf")
    entry = json.loads((tmp_path / "ran_out.json").read_text())["here"]["runs"][0]
    assert entry["message"] == "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize("runs", ["none", [{}], [3], [{"model": "Model", "batch": 1, "limit_bytes": "much"}]])
def test_a_broken_entry_limits_nothing(monkeypatch, tmp_path, runs):
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    (tmp_path / "ran_out.json").write_text(json.dumps({"here": {"runs": runs}}))
    assert oom_records.limit_of("here", "Model", 8, factor=1.0) == float("inf")


def test_plans_that_are_tried_differ_in_their_axes_first():
    names = [
        "tensor=2,micro_batches=2", "tensor=2", "replicate=2", "replicate=2,recompute=full", "shard=2",
        "pipeline=2,micro_batches=4",
    ]  # fmt: skip
    ranked = [candidate(name) for name in names]
    assert [str(one.plan) for one in plans_to_try(ranked, 3)] == [str(ranked[i].plan) for i in (0, 2, 4)]
    assert [str(one.plan) for one in plans_to_try(ranked[:4], 3)] == [str(ranked[i].plan) for i in (0, 1, 2)]
    assert plans_to_try([], 3) == []


def test_state_refs_are_not_counted_as_bytes():
    noted = journal.Journal(StateMachine(SessionState.EMPTY))
    noted.open()
    noted.note((forward(StateRef("model0", "param", "weight")),), ())
    assert noted.state.current is SessionState.REPLAYABLE
