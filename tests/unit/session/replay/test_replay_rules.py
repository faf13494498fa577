"""Which commands are told again, and which differences of answers are rounding."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.protocol.messages.calls import ForwardReply
from moreh_ap.protocol.messages.checkpoints import CheckFiles, ReadCheckpoint, WriteCheckpoint
from moreh_ap.protocol.messages.devices import ReportSteps
from moreh_ap.protocol.messages.models import BuildModel
from moreh_ap.protocol.messages.optimizers import BuildOptimizer, LoadOptimizer, StepOptimizer
from moreh_ap.protocol.messages.snapshots import (
    STILL_OPEN,
    TOO_LARGE,
    TOO_LONG,
    RestoreSnapshot,
    Snapshot,
    TakeSnapshot,
)
from moreh_ap.protocol.messages.state import ReadState
from moreh_ap.protocol.messages.stream import Again, Batch, Synchronize
from moreh_ap.protocol.messages.tensors import MAX_INLINE_BYTES, LeafReply, SavedTensor, StateRef, TensorData, bytes_of
from moreh_ap.protocol.messages.traces import EndTrace
from moreh_ap.protocol.tensor_source import TensorSource
from moreh_ap.runtime.recovery.rules import Noted, Taken
from moreh_ap.session.checkpoint import background_save
from moreh_ap.session.replay.replay_rules import SessionReplayRules

RULES = SessionReplayRules(lambda: None)
STATE = StateRef("model0", "param", "weight")


def leaf(values: torch.Tensor | None) -> LeafReply:
    if values is None:
        return LeafReply("rows", (2,), torch.float32, True, None)
    return LeafReply("share", tuple(values.shape), values.dtype, True, bytes_of(values))


def test_files_are_not_written_again_and_measurements_not_repeated():
    step = StepOptimizer("optimizer0", {})
    batch = Batch((step, WriteCheckpoint("folder/", {}), CheckFiles(()), ReportSteps()))
    assert RULES.again(batch) == Batch((step, Synchronize(), Synchronize(), Synchronize()))
    assert RULES.again(step) is step and RULES.again(EndTrace()) == Synchronize()


def test_files_that_lost_workers_still_wrote_are_written_by_others(monkeypatch):
    writing, others = WriteCheckpoint("folder/a", {}, "", True), WriteCheckpoint("folder/b", {}, "", True)
    assert RULES.may_copy()
    monkeypatch.setattr(background_save, "awaited", {"folder/a"})
    assert RULES.again(Batch((writing, others))) == Batch((writing, Synchronize())) and not RULES.may_copy()


def test_steps_and_the_files_that_commands_name_are_found():
    saved = SavedTensor(torch.float32, (2,), (TensorSource("saved", "weight"),))
    build = BuildModel("model0", b"", "shard=2", {"weight": (TensorSource("a", "weight"), TensorSource("b", "weight"))})
    load = LoadOptimizer("optimizer0", {0: {"exp_avg": saved, "step": 3.0}})
    assert RULES.note(Batch((build, Again(StepOptimizer("optimizer0", {})), load))) == Noted(1, ("a", "b", "saved"))
    assert RULES.note(Batch((ReadCheckpoint({STATE: saved}), StepOptimizer("optimizer0", {})))) == Noted(1, ("saved",))
    assert RULES.note(EndTrace()) == Noted(0)


def test_a_snapshot_stands_for_what_came_before_it_in_its_message_too():
    rules = SessionReplayRules(lambda: None)
    build, step, forward = BuildModel("model0", b"", "shard=2", {}), StepOptimizer("optimizer0", {}), ReadState(())
    optimizer = BuildOptimizer("optimizer0", b"", ((STATE,),), {})
    snapshot = rules.next_snapshot(99, 9.0)
    message = Batch((optimizer, step, snapshot, forward, step))
    assert rules.note(message) == Noted(2, (), has_snapshot=True)
    assert RULES.again(message).commands[2] == Synchronize(), "what others copy is not copied again"
    rules.drop(Batch((build, step)), None)
    rules.drop(Batch((BuildModel("model1", b"", "shard=2", {}), build)), 0)
    restore = RestoreSnapshot(snapshot.slot, snapshot.number)
    told = rules.from_snapshot(message)
    assert told == Batch((build, optimizer, restore, forward, step))
    answers = [[None, "before", "copied", "loss", None], [None, "before", "copied", "other", None]]
    assert rules.behind_snapshot(message, answers) == [["loss", None], ["other", None]]
    second = rules.next_snapshot(99, 9.0)
    assert second.slot != snapshot.slot
    rules.drop(told, None)
    restore = RestoreSnapshot(second.slot, second.number)
    assert rules.from_snapshot(Batch((step, second, step))) == Batch((build, optimizer, restore, step))


@pytest.mark.parametrize(
    "problems, taken",
    [
        (("", ""), Taken("", seconds=0.5, num_bytes=2, largest_bytes=1)),
        (("", STILL_OPEN), Taken(STILL_OPEN, is_passing=True, seconds=0.5, num_bytes=2, largest_bytes=1)),
        (
            (f"{TOO_LARGE}: full", ""),
            Taken(f"{TOO_LARGE}: full", is_too_large=True, seconds=0.5, num_bytes=2, largest_bytes=1),
        ),
        ((TOO_LONG, ""), Taken(TOO_LONG, seconds=0.5, num_bytes=2, largest_bytes=1, needed_s=0.25)),
        (("a lambda", "a lambda"), Taken("a lambda", seconds=0.5, num_bytes=2, largest_bytes=1)),
    ],
)
def test_a_copy_counts_if_all_workers_have_it(problems, taken):
    message = Batch((Synchronize(), TakeSnapshot(0, 1, 1)))
    both = [[None, Snapshot("", 9, 0.1, 2.0)], [None, Snapshot("", 9, 0.2, 1.0)]]
    assert RULES.taken(message, both)[3:] == (0.2, 2.0, 18, 0.0, "", 9)
    first, second = problems
    assert RULES.taken(message, [[None, Snapshot(first, 1, 0.25)], [None, Snapshot(second, 1, 0.5)]]) == taken


def test_small_tensors_of_all_workers_are_kept_of_an_answer():
    loss, large = torch.tensor(0.5), torch.zeros(MAX_INLINE_BYTES)
    forward = ForwardReply(b"", (leaf(loss), leaf(None), LeafReply("const", (), None, False, b"pickled")), "split", "")
    read = [TensorData.of(torch.ones(2)), None, TensorData.of(large)]
    command = Batch((Synchronize(), ReadState(())))
    figures = RULES.figures(command, [[forward, read], [forward, None]])
    ones = (torch.float32, bytes_of(torch.ones(2)))
    assert figures == ((torch.float32, bytes_of(loss)), ones, (torch.float32, bytes_of(loss)))


@pytest.mark.parametrize(
    "before, after, found",
    [
        (torch.tensor([1.0, -2.0]), torch.tensor([1.0, -2.0]), ""),
        (torch.tensor([1.0, -2.0]), torch.tensor([1.00001, -2.0]), ""),
        (torch.tensor([1.0, -2.0]), torch.tensor([1.001, -2.0]), "they differ by 0.001"),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0078], dtype=torch.bfloat16), ""),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), "1 finite numbers before, 0 now"),
        (torch.tensor([3]), torch.tensor([4]), "[3] before, [4] now"),
        (torch.tensor([1.0]), torch.tensor([1.0, 2.0]), "4 bytes before, 8 now"),
        (torch.tensor([1.0]), torch.tensor([1]), "1 values before, 1 now, or of other types"),
    ],
)
def test_only_rounding_is_no_difference(before, after, found):
    figures = [RULES.figures(ReadState(()), [(TensorData.of(values),)]) for values in (before, after)]
    assert RULES.difference(*figures).startswith(found) and bool(found) == bool(RULES.difference(*figures))


def test_the_session_is_told_of_new_processes_and_not_by_a_line_of_the_log(capsys):
    told: list[bool] = []
    rules = SessionReplayRules(lambda: told.append(True))
    rules.say("a worker that is lost from now on ends the run")
    assert capsys.readouterr().out.count("ends the run\n") == 1 and told == []
    rules.others_took_over()
    assert told == [True]


def test_others_under_another_plan_build_models_under_it_and_take_all_copies():
    rules = SessionReplayRules(lambda: None)
    before, after = BuildModel("model0", b"", "shard=2", {}), BuildModel("model0", b"", "replicate=4", {})
    step = StepOptimizer("optimizer0", {})
    snapshot = rules.next_snapshot(99, 9.0)
    assert rules.complete_slot() is None
    kept = rules.from_snapshot(Batch((before, snapshot, step)))
    assert rules.complete_slot() == snapshot.slot
    changed = rules.for_others(lambda command: after if command == before else command, 2)
    build, restore, last = changed(kept).commands
    assert build == after and last is step
    assert restore == RestoreSnapshot(snapshot.slot, snapshot.number, of_workers=2)
    assert changed(before) == after and changed(step) is step
    again = rules.for_others(lambda command: command, 4)(Batch((restore,)))
    assert again.commands == (restore,), "a copy that others have not replaced yet is still of two workers"
    following = rules.next_snapshot(99, 9.0)
    assert rules.from_snapshot(Batch((following,))).commands[0] == after, "structure, too"
