"""A copy of the state of workers that have just failed at the same command, all or one, for workers under another plan.

Decides when their state is still that of before the command that failed. Must not know which plan comes next.

[Note: what an error leaves]
Without recovery no commands are kept. But a forward that ran out of memory on all workers at once has changed nothing
of their state, unless it writes buffers, parameters or attributes; a call that still waits for its backward cannot be
copied. So each worker writes its copy now. The tensors of the commands that failed, and were skipped behind it, are
still in the memory in which they were sent; the script may have changed its own by now.

Where one worker has run out alone, the others have gone on, or wait for it in a collective, perhaps for ever: all are
ended. Before that, the one that failed writes its copy, which is enough where each worker has all of every parameter
(`CopyOfOne`).

On one machine the copy lies in memory of this process, for as long as others need it. On several hosts it lies in that
of the agents, which is there where recovery is on: the log of the workers has it then, as it has any other copy.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

from moreh_ap.local.memory_limit import free_memory
from moreh_ap.protocol.encoding import Packed, WorkerTraceback
from moreh_ap.protocol.messages.calls import Backward, DefineSignature, ReleaseCalls
from moreh_ap.protocol.messages.models import ChangeModule, ReleaseModel, SetKernelFormats, SetRequiresGrad
from moreh_ap.protocol.messages.optimizers import BuildOptimizer, LoadOptimizer, ReleaseOptimizer, StepOptimizer
from moreh_ap.protocol.messages.row_shards import ReleaseRowShards
from moreh_ap.protocol.messages.snapshots import Failed, RestoreSnapshot, Snapshot, TakeSnapshot
from moreh_ap.protocol.messages.state import (
    ClearGradients,
    ClipGradients,
    GradientNorm,
    KeepState,
    ReleaseState,
    RunOperation,
    WriteState,
)
from moreh_ap.protocol.messages.stream import Again, Batch, DefineList, ImportModules
from moreh_ap.protocol.messages.traces import words
from moreh_ap.runtime.future import Reply
from moreh_ap.runtime.recovery.copy_memory import CopyMemory, most_copy_bytes
from moreh_ap.runtime.recovery.recovering_group import RecoveringWorkerGroup
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.replay.restart import Unanswered

_NOT_READ = (
    Again,
    Backward,
    BuildOptimizer,
    ChangeModule,
    ClearGradients,
    ClipGradients,
    DefineList,
    DefineSignature,
    GradientNorm,
    ImportModules,
    KeepState,
    LoadOptimizer,
    ReleaseCalls,
    ReleaseModel,
    ReleaseOptimizer,
    ReleaseRowShards,
    ReleaseState,
    RunOperation,
    SetKernelFormats,
    SetRequiresGrad,
    StepOptimizer,
    WriteState,
)
"""Commands whose answers are not read, or can be asked for again: an error loses those of its whole message."""


_NO_MEMORY = "there is no memory that outlives a worker on this system"


class CannotCopy(Exception):
    """The state of the workers is no longer that of before the command; the text says why."""


class CopyOfOne:
    """The copy of the one worker that has failed, written before all are ended. See [Note: what an error leaves].

    Args:
        error: In which its command has ended.
        num_workers: How many there are.
        ask: Has a worker, by its rank, execute one more command; returns its answer, None if there is none.

    Attributes:
        error: The same.
        memory: In which the copy lies.
        taken: What the worker says of it; None if it does not answer.
        restore: What has others take it over.
    """

    def __init__(self, error: BaseException, num_workers: int, ask: Callable[[int, object], object]) -> None:
        cause = error.__cause__
        assert isinstance(cause, WorkerTraceback), "it is a worker's error"
        self.error, self.memory = error, CopyMemory(num_workers)
        self.taken: Snapshot | None = None
        self.restore: RestoreSnapshot | None = None
        if self.memory.files:
            most_bytes = most_copy_bytes(free_memory(), 1)
            copy = TakeSnapshot(self.memory.files[0], 1, most_bytes, after_error=True, is_alone=True)
            answers = cast("list[Snapshot] | None", ask(cause.rank, Batch((copy,))))
            self.taken = answers[0] if answers else None
            self.restore = RestoreSnapshot(copy.slot, copy.number, 1, first=cause.rank)

    def require(self) -> tuple[list[Snapshot], RestoreSnapshot]:
        """Returns what the worker says, and what restores the copy.

        Raises:
            CannotCopy: There is no copy.
        """
        if self.taken is None or self.restore is None:
            raise CannotCopy("the worker that failed could not write a copy of it")
        return [self.taken], self.restore


class CopyAfterError:
    """The copy, and the commands to be sent after it.

    Attributes:
        is_logged: Whether others get the copy with the log of the workers before them.

    Args:
        workers: All of which have failed.
        error: In which a command has ended, and which has been raised.
        unanswered: The messages that ended in it.
        of_one: The copy of the one that has failed, where others have not.

    Raises:
        CannotCopy: The workers have ended, or hold something half made.
    """

    def __init__(
        self, workers: WorkerGroup, error: BaseException, unanswered: Unanswered, of_one: CopyOfOne | None = None
    ) -> None:
        if not workers.is_stopped():
            of_one = None
        elif of_one is None or of_one.error is not error:
            raise CannotCopy("one worker ran out alone, and the others, with their part, have ended with it")
        self.is_logged = not workers.shares_memory
        self._memory = of_one.memory if of_one else None if self.is_logged else CopyMemory(workers.num_workers)
        restore: RestoreSnapshot | None
        try:
            if of_one:
                taken, restore = of_one.require()
            elif self._memory is None:
                taken, restore = _logged(workers)
            else:
                taken, restore = _written(workers, self._memory)
            failed = [one.failed for one in taken if one.failed is not None]
            _require_whole(taken, failed)
            self._messages = [(_commands_of(reply, workers), posted) for _, posted, reply in unanswered.ended_in(error)]
            if not self._messages:
                raise CannotCopy("the command that failed is not known")
            self._cut(failed[0].num_done)
        except BaseException:
            if self._memory is not None:
                self._memory.close()
            raise
        self._first = [] if restore is None else [*failed[0].structure, restore]

    def _cut(self, num_done: int) -> None:
        """Leaves out of the message that failed what was executed before."""
        commands, posted = self._messages[0]
        for command in commands[:num_done]:
            if not isinstance(command, _NOT_READ):
                raise CannotCopy(f'the answer to "{words(type(command))}" was lost with the error')
        self._messages[0] = commands[num_done:], posted[num_done:]

    def messages(
        self, change: Callable[[Any], Any], promise: Callable[[], Any], restored: Callable[[], object]
    ) -> list[tuple[list[Any], list[Any]]]:
        """Returns the messages for the next workers: commands, and promises of their results.

        Args:
            change: Returns a command for them, itself if it does not depend on plans.
            promise: Makes a promise.
            restored: Called once the workers have restored the copy.
        """
        if self._memory is None:
            return self._messages
        memory, first = self._memory, [change(command) for command in self._first]
        posted = [promise() for _ in first]

        def done(restoring: Any) -> None:
            memory.close()
            if not restoring.failed():
                restored()

        posted[-1].add_done_callback(done)
        return [(first, posted), *self._messages]


def _written(workers: WorkerGroup, memory: CopyMemory) -> tuple[list[Snapshot], RestoreSnapshot | None]:
    """Has workers of this machine write the copy; returns their answers, and what restores it."""
    if not memory.files:
        raise CannotCopy(_NO_MEMORY)
    copy = TakeSnapshot(memory.files[0], 1, memory.most_bytes(), after_error=True)
    answers = _answers(lambda: workers.submit(Batch((copy,))).result())
    return answers, RestoreSnapshot(copy.slot, copy.number, workers.num_workers)


def _logged(workers: WorkerGroup) -> tuple[list[Snapshot], RestoreSnapshot | None]:
    """Has workers of several hosts write the copy, which their log has then; returns their answers."""
    if not isinstance(workers, RecoveringWorkerGroup):
        raise CannotCopy("recovery is off")
    return _answers(workers.copy_after_error), None


def _answers(take: Callable[[], Sequence[Any] | None]) -> list[Snapshot]:
    try:
        answers = take()
    except Exception as another:  # of any class: the first error reaches the script
        raise CannotCopy(f"{type(another).__name__}: {another}") from another
    if answers is None:
        raise CannotCopy(_NO_MEMORY)
    return [one[0] for one in answers]


def _require_whole(taken: Sequence[Snapshot], failed: Sequence[Failed]) -> None:
    for one in taken:
        if one.problem or one.bound:
            raise CannotCopy(one.problem or one.bound)
    for of_one in failed:
        if of_one.half_made:
            raise CannotCopy(of_one.half_made)
    if len({of_one.num_done for of_one in failed}) != 1:
        raise CannotCopy("workers have failed at different commands")


def _commands_of(reply: Reply, workers: WorkerGroup) -> list[Any]:
    """Returns the commands of a message with the values that were sent."""
    packed = reply.payload
    assert isinstance(packed, Packed), "what ended in an error is kept, and was for all workers"
    try:
        buffers = workers.shared_memory.read(packed.buffers)
    except OSError as error:
        raise CannotCopy(str(error)) from error
    batch = pickle.loads(packed.pickle, buffers=buffers)
    return list(batch.commands)
