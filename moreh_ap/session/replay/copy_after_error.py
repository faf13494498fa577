"""A copy of the state of workers that have all just failed at the same command, for workers under another plan.

Decides when their state is still that of before the command that failed. Must not know which plan comes next.

[Note: what an error leaves]
Without recovery no commands are kept. But a forward that ran out of memory on all workers at once has changed nothing
of their state, unless it writes buffers, parameters or attributes; a call that still waits for its backward cannot be
copied. So each worker writes its copy now. The tensors of the commands that failed, and were skipped behind it, are
still in the memory in which they were sent; the script may have changed its own by now.

On one machine the copy lies in memory of this process, for as long as others need it. On several hosts it lies in that
of the agents, which is there where recovery is on: the log of the workers has it then, as it has any other copy.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from moreh_ap.protocol.encoding import Packed
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
from moreh_ap.runtime.recovery.copy_memory import CopyMemory
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


class CopyAfterError:
    """The copy, and the commands to be sent after it.

    Attributes:
        is_logged: Whether others get the copy with the log of the workers before them.

    Args:
        workers: All of which have failed.
        error: In which a command has ended, and which has been raised.
        unanswered: The messages that ended in it.

    Raises:
        CannotCopy: The workers have ended, or hold something half made.
    """

    def __init__(self, workers: WorkerGroup, error: BaseException, unanswered: Unanswered) -> None:
        if workers.is_stopped():
            raise CannotCopy("not all workers have failed at the same command")
        self.is_logged = not workers.shares_memory
        self._memory = None if self.is_logged else CopyMemory(workers.num_workers)
        try:
            taken, restore = _logged(workers) if self._memory is None else _written(workers, self._memory)
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
