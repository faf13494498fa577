"""One worker's side of the mesh: joins the process group, then executes commands in order and answers each.

Decides what becomes of an exception: it is answered, never lost, and commands that were already on their way behind it
are skipped, so that nothing runs on a state that a failed command left half made. Must not know the engine that calls
it, nor what commands do: an executor named by the controller does them.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from moreh_ap.protocol.encoding import Packed, capture_failure, import_by_name, pack, unpack
from moreh_ap.protocol.messages.memory_files import MemoryFile
from moreh_ap.runtime.relay.command_socket import CommandSocket
from moreh_ap.runtime.relay.frames import MISSING, Frame
from moreh_ap.runtime.relay.worker_answer import DONE, FAILED, SKIPPED, Answer
from moreh_ap.runtime.relay.written_answers import written_other, written_result
from moreh_ap.runtime.shared_memory import SharedMemoryReader
from moreh_ap.runtime.worker.answers.answering_thread import AnsweringThread
from moreh_ap.runtime.worker_environment import workers_per_gpu


class Trouble(NamedTuple):
    """The failure because of which a worker skips the other commands of an epoch.

    Attributes:
        number, epoch: which command failed.
        answer: what the worker answered to it.
    """

    number: int
    epoch: int
    answer: Answer


@dataclass(frozen=True)
class WorkerSpec:
    """The values with which a worker joins the others.

    Attributes:
        rank, world_size: its place among the workers.
        device_type: "cuda" or "cpu".
        executor: "package.module:Class"; called with rank, world_size and device_type, in the thread that executes.
        shared_memory_fd: file descriptor, inherited, of the memory in which large values of commands lie.
        store_path: file through which the workers meet, in a folder that only this user can enter.
        store_class: "package.module:Class" of a store, called with path and time-out; empty: PyTorch's for files.
        collective_timeout_s: how long a collective may wait for its peers before it raises.
        commands_path: where it connects for commands: to the controller, or to the agent of its host.
        index: which of the workers of its host it is.
        is_relayed: whether that agent joins the answers of its workers.
        copies: slots of memory that outlives it, in which it keeps copies of what it holds; none without recovery. The
            executor gets them through `keep_copies_in`.
    """

    rank: int
    world_size: int
    device_type: str
    executor: str
    shared_memory_fd: int
    store_path: str
    collective_timeout_s: float
    store_class: str = ""
    commands_path: str = ""
    index: int = 0
    is_relayed: bool = False
    copies: tuple[MemoryFile, ...] = ()


class WorkerSide:
    """Executes commands. One thread calls all methods but `trouble`, and joins the process group, too."""

    def __init__(self) -> None:
        self._spec: WorkerSpec | None = None
        self._shared_memory: SharedMemoryReader | None = None
        self._executor: Any = None
        self._store: object = None  # kept alive: PyTorch uses it as long as there are groups
        self._trouble: Trouble | None = None
        self._commands: CommandSocket | None = None
        self._pack: Callable[[object], Any] = pack  # what becomes of a result
        self._answers: AnsweringThread | None = None  # of a GPU; packs results in place of the thread that executes
        self._pack_late: Callable[[object], Any] = pack

    def join(self, spec: WorkerSpec) -> Answer:
        """Joins the process group of all workers, waiting for them. Counts as command 0, in epoch 0."""
        self._spec, self._shared_memory = spec, SharedMemoryReader(spec.shared_memory_fd)
        if spec.device_type == "cuda":
            self._answers, self._pack = AnsweringThread(), _unchanged
        try:
            if spec.commands_path:
                self._commands = CommandSocket(spec.commands_path, spec.index)
            self._store = _join_process_group(spec)
            return Answer(DONE, pack(None))
        except BaseException as error:  # any error of torch.distributed: the controller has to hear of it
            return self._fail(0, 0, error)

    def execute(self, number: int, epoch: int, command: Packed) -> Answer:
        """Executes one command.

        Args:
            number: its place in the stream of commands.
            epoch: how many failures the controller had raised when it sent the command. A command of the epoch in
                which an earlier one failed was sent in ignorance of that failure and is skipped.
            command: the packed command.
        """
        assert self._spec is not None and self._shared_memory is not None, "the engine delivers join first"
        if self._trouble is not None and self._trouble.epoch == epoch:
            return Answer(SKIPPED, None)
        try:
            if self._executor is None:
                factory: Any = import_by_name(self._spec.executor)
                self._executor = factory(self._spec.rank, self._spec.world_size, self._spec.device_type)
                if self._spec.copies:
                    self._executor.keep_copies_in(self._spec.copies)
            if not command.buffers:
                return Answer(DONE, self._pack(self._executor.execute(unpack(command))))
            with self._shared_memory.values(command.buffers) as buffers:
                result = self._executor.execute(unpack(Packed(command.pickle, buffers, command.aside)))
                return Answer(DONE, self._pack(result))
        except BaseException as error:  # any error of the user's code; SystemExit would end the worker unheard
            return self._fail(number, epoch, error)

    def execute_and_go_on(self, number: int, epoch: int, command: Packed, send: Callable[[Answer], None]) -> None:
        """Executes one command of a GPU's worker; another thread sends the answer ([Note: answers of a GPU] in
        `late_replies.py`).

        Args:
            number, epoch, command: as those of `execute`.
            send: sends the answer.
        """
        answer = self.execute(number, epoch, command)
        assert self._answers is not None, "a GPU's worker has one"
        self._answers.put(lambda: send(self._packed_late(number, epoch, answer)))

    def _packed_late(self, number: int, epoch: int, answer: Answer) -> Answer:
        """Returns an answer whose result is packed; waits until the GPU has computed what is in it."""
        if answer.status != DONE:
            return answer
        try:
            return Answer(DONE, self._pack_late(answer.content))
        except BaseException as error:  # what pickling raises, and what the GPU finds out only now
            return self._fail(number, epoch, error)

    def trouble(self) -> Trouble | None:
        """Returns the last failure. Any thread may ask, also while a command hangs: this is how the controller learns
        why the others wait for this worker."""
        return self._trouble

    def serve(self) -> None:
        """Executes what comes over the connection for commands, until that ends."""
        assert self._spec is not None and self._commands is not None and self._shared_memory is not None, "joined first"
        if self._spec.is_relayed:
            if self._answers is None:
                self._pack = written_result
            else:
                self._pack_late = written_result
        while (frame := self._commands.receive()) is not None:
            if frame.kind == MISSING:
                self._shared_memory.missing.add(frame.number)
                continue
            command = Packed(*pickle.loads(frame.parts[0]))
            if self._answers is None:
                self._send(frame, self.execute(frame.number, frame.epoch, command))
            else:
                self.execute_and_go_on(frame.number, frame.epoch, command, partial(self._send, frame))

    def _send(self, command: Frame, answer: Answer) -> None:
        assert self._spec is not None and self._commands is not None, "joined first"
        parts: Any
        if not self._spec.is_relayed:
            parts = [pickle.dumps(answer, protocol=5)]
        else:
            parts = answer.content if answer.status == DONE else written_other(answer)
        self._commands.answer(command, parts, has_failed=answer.status == FAILED)

    def _fail(self, number: int, epoch: int, error: BaseException) -> Answer:
        assert self._spec is not None, "set before anything can fail"
        answer = Answer(FAILED, pack(capture_failure(error, self._spec.rank)))
        self._trouble = Trouble(number, epoch, answer)
        return answer


def _unchanged(result: object) -> object:
    return result


def _join_process_group(spec: WorkerSpec) -> object:
    """Joins, and returns the store."""
    import torch
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=spec.collective_timeout_s)
    store: dist.Store
    if spec.store_class:
        factory: Any = import_by_name(spec.store_class)
        store = factory(spec.store_path, timeout)
    else:
        store = dist.FileStore(spec.store_path, spec.world_size)
        store.set_timeout(timeout)
    backend, device_id = "gloo", None
    if spec.device_type == "cuda":
        # The current device belongs to the thread, which is why this runs in the thread that executes commands.
        torch.cuda.set_device(0)
        backend, device_id = "cpu:gloo,cuda:nccl", torch.device("cuda", 0)
        if workers_per_gpu() > 1:  # NCCL refuses two workers on one device
            backend, device_id = "cpu:gloo,cuda:gloo", None
    dist.init_process_group(
        backend, store=store, rank=spec.rank, world_size=spec.world_size, timeout=timeout, device_id=device_id
    )
    return store
