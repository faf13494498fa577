"""When commands leave for the workers, and what other workers are told again."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.errors import NotComputedError, WorkerLostError
from moreh_ap.protocol.encoding import WorkerTraceback
from moreh_ap.protocol.messages.models import ChangeModule, ReleaseModel, SetRequiresGrad
from moreh_ap.protocol.messages.optimizers import StepOptimizer
from moreh_ap.protocol.messages.state import ClearGradients
from moreh_ap.protocol.messages.stream import Again, DefineList, Synchronize
from moreh_ap.protocol.messages.tensors import OutputRef, StateRef, TensorData
from moreh_ap.session.outbox import Outbox
from moreh_ap.session.replay.restart import Restart
from unit.session.samples import Workers, forward


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


class Busy(Workers):
    """Answers a message when it is told to."""

    def __init__(self):
        super().__init__()
        self.waiting = []

    def submit(self, batch):
        answer = super().submit(batch)
        answer.callbacks, answer.arrived = [], False
        answer.add_done_callback = answer.callbacks.append
        answer.done = lambda: answer.arrived
        self.waiting.append(answer)
        return answer

    def answer(self):
        answer = self.waiting.pop(0)
        answer.arrived = True
        for callback in answer.callbacks:
            callback(answer)


def grads(*names):
    return tuple(StateRef("model0", "grad", name) for name in names)


def test_what_is_posted_leaves_with_the_next_message_and_in_order():
    workers = Workers()
    outbox = Outbox(workers)
    posted = [outbox.post("first"), outbox.post("second")]
    outbox.release("freed")
    assert workers.told == [] and not any(one.done() for one in posted)
    outbox.submit("third")
    assert workers.told == [("first", "second", "third", "freed")]
    assert posted[1].result() == ["str"], "results are those of the worker, by their place in the message"


def test_waiting_for_what_is_gathered_sends_it():
    workers = Workers()
    assert Outbox(workers).post(Synchronize()).result() == ["Synchronize"]


def test_what_is_wanted_soon_leaves_at_once_if_workers_are_idle_and_with_their_answer_if_not():
    workers = Busy()
    outbox = Outbox(workers)
    outbox.post_soon("first")
    outbox.post_soon("second")
    outbox.post("third")
    assert workers.told == [("first",)]
    workers.answer()
    assert workers.told == [("first",), ("second", "third")]
    outbox.post("fourth")
    workers.answer()
    assert len(workers.told) == 2, "nobody wants that one soon"


def test_an_answer_that_comes_once_the_workers_are_closed_is_no_error():
    """What was to follow it cannot be sent; who waits for that gets the error."""
    workers = Busy()
    outbox = Outbox(workers)
    outbox.submit("first")
    later = outbox.post_soon("second")

    def closed(batch):
        raise WorkerLostError("The workers have been closed.")

    workers.submit = closed
    workers.answer()
    with pytest.raises(WorkerLostError):
        later.result()


def test_for_gpus_what_is_wanted_soon_leaves_although_workers_are_busy():
    workers = Busy()
    outbox = Outbox(workers, leaves_at_once=True)
    outbox.submit(Synchronize())
    outbox.post(ReleaseModel("first"))
    outbox.post_soon(ReleaseModel("second"))
    assert len(workers.waiting) == 2 and [len(commands) for commands in workers.told] == [1, 2]


@pytest.mark.parametrize("why", ["journal", "recovery", "nothing"])
def test_commands_that_are_kept_own_their_tensors(why):
    workers = Workers()
    outbox, batch = Outbox(workers), torch.ones(9000)
    if why == "journal":
        outbox.journal.open()
    workers.keeps_values = why == "recovery"
    outbox.submit(forward(TensorData.of(batch, lend=True), OutputRef(0, 0)))
    batch.zero_()  # by the script
    kept = [message.commands for message in outbox.journal.messages()] or workers.told
    (((told, other),),) = [[command.tensors for command in commands] for commands in kept]
    assert float(told.tensor().sum()) == (0 if why == "nothing" else 9000) and other == OutputRef(0, 0)


def test_what_the_workers_want_goes_in_front_of_the_first_forward_behind_a_step():
    workers = Workers()
    outbox, step, call = Outbox(workers), StepOptimizer("optimizer0", {}), forward()
    noted = []
    outbox.on_sent = lambda commands, posted: noted.append((list(commands), len(posted)))
    workers.wanted = "snapshot"
    outbox.submit(Synchronize())
    for command in (call, step, call):
        outbox.post(command)
    last = outbox.submit(call)
    outbox.submit(call)
    assert workers.told == [
        (Synchronize(),),
        (call, step, "snapshot", call, call),
        ("snapshot", call),
    ]
    assert [commands for commands, _ in noted][1:] == [[call, step, call, call], [call]], "others are not told of it"
    assert last._index == 4, "the answer to the last one is the fifth"
    workers.wanted = None
    outbox.submit(call)
    assert workers.told[-1] == (call,)


def test_many_gathered_commands_leave_by_themselves():
    workers = Workers()
    outbox = Outbox(workers)
    for number in range(1000):
        outbox.post(number)
    assert 1 <= len(workers.told) <= 3 and sum(workers.told, ()) == tuple(range(len(sum(workers.told, ()))))


def test_gradients_cleared_one_after_the_other_are_one_command_and_their_list_is_told_once():
    workers = Workers()
    outbox = Outbox(workers)
    for _ in range(2):
        outbox.post_clear(grads("a"))
        outbox.post_clear(grads("b", "c"))
        outbox.post_clear(())
        outbox.flush()
    (definition, first), (second,) = workers.told
    assert isinstance(definition, DefineList) and definition.refs == grads("a", "b", "c")
    assert first == second == ClearGradients(definition.list_id)


def test_what_comes_between_two_clearings_stays_between_them():
    workers = Workers()
    outbox = Outbox(workers)
    outbox.post_clear(grads("a"))
    outbox.post(Synchronize())
    outbox.post_clear(grads("b"))
    outbox.flush()
    kinds = [type(command).__name__ for command in workers.told[0] if not isinstance(command, DefineList)]
    assert kinds == ["ClearGradients", "Synchronize", "ClearGradients"]


def test_a_definition_is_told_anew_after_a_failure():
    workers = Workers(fails_at=0)
    outbox = Outbox(workers)
    number = outbox.list_id(grads("a"))
    assert outbox.list_id(grads("a")) == number and outbox.list_id(grads("b")) != number
    assert outbox.submit(Synchronize()).failed()
    assert outbox.list_id(grads("a")) != number and outbox.times_forgotten == 1
    assert outbox.list_id(grads("a")) == outbox.list_id(grads("a")), "only once"


def test_what_a_failed_message_was_to_free_is_freed_with_the_next():
    workers = Workers(fails_at=0)
    outbox = Outbox(workers)
    outbox.release(ReleaseModel("model"))
    assert outbox.submit(Synchronize()).failed()
    outbox.submit(Synchronize())
    outbox.submit(Synchronize())
    assert [ReleaseModel("model") in message for message in workers.told] == [True, True, False]


# -- after an error ----------------------------------------------------------------------------------------------------

SETTING, OTHER = ChangeModule("model0", (("", "gain", b"2"),)), SetRequiresGrad("model0", {"weight": False})


def raised(num_done):
    error = IndexError("no such row")
    error.__cause__ = WorkerTraceback(0, "Traceback", num_done)
    return error


class Failing(Workers):
    """Answers every message with an error, as long as there is one."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def submit(self, batch):
        answer = super().submit(batch)
        answer.error = self.error
        return answer


def test_settings_behind_the_command_that_raised_are_sent_again_before_anything_else():
    workers = Failing(raised(num_done=1))
    outbox = Outbox(workers)
    outbox.post(SETTING)  # was executed
    outbox.post(Synchronize())  # raised
    outbox.post(OTHER)
    outbox.submit("computes")
    assert outbox.times_failed == 1
    outbox.submit(SETTING)  # skipped, with the same error
    assert outbox.times_failed == 2
    workers.error = None
    outbox.submit("computes")
    assert workers.told[1] == (Again(OTHER), SETTING), "but that message was skipped too"
    assert workers.told[2] == (Again(OTHER), Again(SETTING), "computes")
    outbox.submit("computes")
    assert workers.told[3] == ("computes",)


def test_what_could_not_be_sent_for_an_error_says_so_and_its_settings_are_sent_with_the_next_message():
    class Raising(Workers):
        def submit(self, batch):
            if not self.told:
                self.told.append("refused")
                raise IndexError("of an earlier command")
            return super().submit(batch)

    workers, told = Raising(), []
    outbox = Outbox(workers)
    posted = outbox.post(SETTING)
    posted.add_done_callback(lambda one: told.append(one.failed()))
    with pytest.raises(IndexError):
        outbox.flush()
    assert posted.done() and told == [True] and outbox.has_stale_definitions
    for use in (posted.result, posted.require):
        with pytest.raises(NotComputedError, match="the workers had raised IndexError: of an earlier command"):
            use()
    assert outbox.submit(Synchronize()).result() == ["Synchronize"]
    assert workers.told[1] == (Again(SETTING), Synchronize())


def test_a_promise_that_is_kept_or_still_open_is_required_in_vain():
    outbox = Outbox(Busy())
    posted = outbox.post(Synchronize())
    posted.require()
    outbox.flush()
    posted.require()
    assert not posted.failed()


def test_what_ended_in_an_error_is_sent_to_others_that_know_what_was_done_before():
    first, second = Workers(fails_at=1), Workers()
    outbox = Outbox(first)
    outbox.on_error = lambda error: Restart(second, lambda command: command, error)
    done = outbox.submit("done")
    failed = outbox.submit("failed")
    told = []
    failed.add_done_callback(lambda posted: told.append(posted.failed()))
    assert failed.result() == ["str"] and done.result() == ["str"]
    assert second.told == [("failed",)] and told == [True, False]
    assert outbox.submit("next").result() == ["str"] and second.told == [("failed",), ("next",)]


def test_a_message_that_could_not_be_sent_for_an_error_of_before_is_sent_to_others_once():
    class Refusing(Workers):
        def submit(self, batch):
            if self.told:
                raise error
            return super().submit(batch)

    error = torch.OutOfMemoryError("no memory")
    first, second = Refusing(), Workers()
    outbox = Outbox(first)
    outbox.on_error = lambda error: Restart(second, lambda command: command, error)
    outbox.submit("done")
    posted = outbox.submit("next")
    assert posted.result() == ["str"] and second.told == [("next",)]
    assert outbox.times_restarted == 1
