"""Worker processes, one a device, that execute an ordered stream of commands: the controller's side.

Decides when a command is sent, in which order replies are completed, who gets an error and when workers have to
go. Must not know what a command does, nor torch, nor the engine. A background thread starts the workers and receives
all answers; the script's own threads only send, and wait on ordinary locks.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moreh_ap.errors import ExactnessError, MeshStartError, WorkerLostError
from moreh_ap.local.interrupts import TURN_S, wait_in_turns
from moreh_ap.protocol.encoding import Packed
from moreh_ap.runtime.engine_error import was_too_slow
from moreh_ap.runtime.future import Reply, SentCommand, told_again
from moreh_ap.runtime.joining import launch
from moreh_ap.runtime.launcher import Launcher, LaunchRequest, Progress, Stopping
from moreh_ap.runtime.outcome_resolver import OutcomeResolver, PeersHang, stopped_error, unexpected_error
from moreh_ap.runtime.receiver import Receiver
from moreh_ap.runtime.relay.carrier import Ask, Awaited, Carrier
from moreh_ap.runtime.shared_memory import SharedMemory

MAX_OUTSTANDING = 256
_JOIN_S = 5.0  # how long closing waits for the background thread, after the workers were sent the end
_IDLE_LOOK_S = 0.5  # how often the workers are looked after while there is nothing to receive

MakeLauncher = Callable[[LaunchRequest, Callable[[], bool]], Launcher]
"""Returns the launcher of a request; the second argument says whether the worker group is being closed."""


class WorkerGroup:
    """Worker processes that execute the same commands in the same order. Commands may be submitted before they run.

    Args:
        num_workers: how many processes, one a device.
        device_type: "cuda" or "cpu"; decides the collective backend and which device a worker sees.
        threads_per_worker: CPU threads that numerical libraries may use in each worker.
        executor: "package.module:Class". Each worker calls it with rank, world size and device type, in the thread in
            which it will execute, and then its `execute(command)` for each command.
        on_progress: called in a background thread as ``on_progress(stage, done, total)`` with the stages "spawn",
            "connect" (once a worker), "link" and "ready".
        preimport: modules that workers import early, after torch, if the script imports their libraries.
        start_timeout_s: how long the processes may take to answer.
        collective_timeout_s: how long a collective may wait for its peers.
        visible_devices: what CUDA_VISIBLE_DEVICES was when the devices were counted; None: what it is now.
        make_launcher: returns what starts the processes; None: the launcher that starts them on this machine.
        shares_memory: whether it does, so that they may read large values from this process's memory at once.

    Attributes:
        num_workers: how many.
        num_waits: how often a caller had to wait for a reply that was not there.
        keeps_commands, keeps_values, wanted: whether sent commands are noted, with values; what goes with a forward.
        before_end: called in that thread before workers are ended that cannot go on together after an error.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        device_type: str,
        threads_per_worker: int,
        executor: str = "moreh_ap.runtime.worker.executor:WorkerExecutor",
        on_progress: Progress | None = None,
        preimport: Sequence[str] = (),
        start_timeout_s: float = 300.0,
        collective_timeout_s: float = 300.0,
        visible_devices: str | None = None,
        make_launcher: MakeLauncher | None = None,
        shares_memory: bool = True,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; it must be at least 1")
        self.num_workers, self.device_type, self.shares_memory = num_workers, device_type, shares_memory
        self.num_waits, self.keeps_commands, self.keeps_values, self.wanted = 0, False, False, None
        self._on_progress: Progress = on_progress or (lambda stage, done, total: None)
        self._lock = threading.Lock()
        self._changed, self._slots = threading.Condition(self._lock), threading.BoundedSemaphore(MAX_OUTSTANDING)
        self.before_end: Callable[[BaseException, Ask], object] = lambda error, ask: None
        self._carrier: Carrier | None = None
        self._unsent: deque[SentCommand] = deque()
        self._sent: deque[tuple[SentCommand, Awaited]] = deque()
        self._last_number = self._epoch = 0  # command 0 is the workers' joining; those of the script count from 1
        self._errors: deque[tuple[int, BaseException]] = deque()  # not raised yet, each with its command's number
        self._resolver = OutcomeResolver(lambda rank: self._launcher.place_of(rank))
        self._stopped: BaseException | None = None  # why no further command is accepted
        self._ready, self._owner_pid = threading.Event(), os.getpid()
        memory = self.shared_memory = SharedMemory(shares_memory)
        what, timeouts_s = (num_workers, device_type, threads_per_worker), (start_timeout_s, collective_timeout_s)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if visible_devices is None else visible_devices
        request = LaunchRequest(*what, executor, ("torch", *preimport), *timeouts_s, memory.descriptor, visible)
        self._request, self._make_launcher = request, make_launcher or Launcher
        self._launcher = self._make_launcher(request, self.is_stopped)
        self._thread = threading.Thread(target=self._run, name="moreh-workers", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    # -- for the script's threads ----------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; complete once all workers are ready."""
        return list(self._launcher.pids)

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Waits until every worker has joined the process group.

        Raises:
            MeshStartError: the workers could not be started, or not in time.
        """
        if not wait_in_turns(self._ready.wait, timeout_s):
            fact = f"The {self.num_workers} worker processes are not ready after {timeout_s} s."
            raise MeshStartError(fact, fix="wait longer if the machine is busy")
        self.check()
        if self._stopped is not None:
            raise stopped_error(self._stopped)

    def submit(self, command: object, *, recoverable: bool = False) -> Reply:
        """Sends `command` to every worker, after all that were submitted before. Does not wait for the answer, but for
        a place while `MAX_OUTSTANDING` commands are unanswered.

        Args:
            command: any object whose class workers can import. It is pickled now, so later changes do not matter.
            recoverable: the command changes no state that another command relies on, so workers on which it succeeded
                and those on which it failed can go on together.

        Raises:
            Exception: an error of an earlier command, in its own type.
            WorkerLostError: the workers have been stopped.
        """
        return self._submit(lambda: self._packed(command), recoverable, command)

    def submit_each(self, commands: Sequence[object], *, recoverable: bool = False) -> Reply:
        """Like `submit`, with one command a worker, in rank order."""
        if len(commands) != self.num_workers:
            raise ValueError(f"{len(commands)} commands for {self.num_workers} workers")
        ranked = list(enumerate(commands))
        return self._submit(lambda: [self._packed(command, rank) for rank, command in ranked], recoverable, commands)

    def drain(self) -> None:
        """Waits until every command submitted so far is done.

        Raises:
            Exception: the first error that has not been raised yet.
        """
        with self._lock:
            last = self._unsent[-1] if self._unsent else self._sent[-1][0] if self._sent else None
        if last is not None:
            self._wait(last.reply)
        self.check()

    def check(self) -> None:
        """Raises the first error that has not been raised yet. Never waits."""
        self._raise_pending(None)

    def fail(self, error: BaseException) -> None:
        """Lets `error` be raised where an error of a worker would be: at the script's next call. For callbacks."""
        with self._lock:
            self._errors.append((0, error))

    def provide(self, files: Sequence[str]) -> None:
        """Has every worker find files of this machine that commands will name."""
        self._launcher.provide(files)

    def take(self, written: Mapping[int, tuple[str, str]]) -> dict[int, str]:
        """Moves files that workers have written on other hosts to this machine; see `Launcher.take`."""
        return self._launcher.take(written)

    def close(self) -> None:
        """Ends all workers at once; what they have not finished is lost. Harmless when repeated."""
        if os.getpid() != self._owner_pid:  # a forked child must leave its parent's workers alone
            return
        atexit.unregister(self.close)
        self._stop(WorkerLostError("The workers have been closed."), tell=False)
        if threading.current_thread() is not self._thread:
            # With a limit: an interrupted import may have left its lock with this thread, and the other waits for it.
            self._thread.join(_JOIN_S)

    def answers(self, reply: Reply, timeout_s: float | None = None) -> list[Any]:
        """Returns the results of a command, one a worker, in rank order; waits for them where it must.

        Raises:
            Exception: what a worker raised, in its own type, with the worker's traceback as `__cause__`; or such an
                error of an earlier command. `NotComputedError` where it has been raised before.
            WorkerLostError: a worker process died.
            TimeoutError: the command was not done in time; it goes on, and its answers may be asked for again.
        """
        self._wait(reply, timeout_s)
        self._raise_pending(reply.number)
        error = reply.exception()
        if error is not None:  # raised before, by this command or by an earlier one
            raise told_again(error)
        return concurrent.futures.Future.result(reply)  # type: ignore[no-any-return]

    def _wait(self, reply: Reply, timeout_s: float | None = None) -> None:
        """Waits until a command is done, however it ended.

        Raises:
            TimeoutError: it was not done in time.
        """
        if not reply.done():
            self.num_waits += 1
            first_s = TURN_S if timeout_s is None else min(TURN_S, timeout_s)  # most are over in it, without our calls
            if concurrent.futures.wait([reply], first_s).done:
                return
            if not wait_in_turns(lambda turn_s: concurrent.futures.wait([reply], turn_s).done, timeout_s):
                raise TimeoutError(f"the workers have not answered within {timeout_s} s")

    def _raise_pending(self, up_to: int | None) -> None:
        """Raises the oldest error not raised yet, if it is of command `up_to` or an earlier one (None: of any)."""
        if threading.current_thread() is self._thread:
            return  # callbacks read replies there; what is raised there the script would never see
        with self._lock:
            if not self._errors or (up_to is not None and self._errors[0][0] > up_to):
                return
            error = self._errors.popleft()[1]
            self._epoch += 1
        raise error

    # -- sending ---------------------------------------------------------------------------------------------------

    def _submit(self, pack: Callable[[], Packed | list[Packed]], recoverable: bool, command: object) -> Reply:
        if os.getpid() != self._owner_pid:
            fact = "A forked child process cannot use the accelerator of its parent."
            raise WorkerLostError(fact, "CPU tensors in the workers of a DataLoader or of datasets.map")
        self.check()
        payload = pack()
        if not self._slots.acquire(blocking=False):
            wait_in_turns(lambda turn_s: self._slots.acquire(timeout=turn_s))
        with self._lock:
            if self._stopped is None:
                self._last_number += 1
                reply = Reply()
                reply.group, reply.number = self, self._last_number
                origin = command if self.keeps_commands else None
                self._send(SentCommand(reply, self._last_number, self._epoch, recoverable, payload, origin))
                return reply
        self._slots.release()
        self.check()
        raise stopped_error(self._stopped)

    def _packed(self, command: object, rank: int | None = None) -> Packed:
        """Returns a command as it is sent; it leaves large values out of the pickle by itself (`TensorData`)."""
        buffers: list[pickle.PickleBuffer] = []
        content = pickle.dumps(command, protocol=5, buffer_callback=buffers.append)
        return Packed(content, self.shared_memory.store(buffers, rank) if buffers else ())

    def _send(self, command: SentCommand) -> None:
        """Sends a command, or keeps it until there are workers. The caller holds the lock: order is what it is for."""
        if self._carrier is None:
            self._unsent.append(command)
        else:
            pending = self._carrier.execute(command.number, command.epoch, command.payload)
            self._sent.append((command, pending))
            self._changed.notify()

    # -- the background thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Starts the workers, receives until they are stopped, and always ends them."""
        try:
            receiver = self._start()
            while not self.is_stopped():
                try:
                    self._receive_next(receiver)
                except WorkerLostError as lost:
                    receiver = self._replace(lost)
        except Stopping:
            return
        except (MeshStartError, WorkerLostError, ExactnessError) as error:
            self._stop(error)
        except Exception as error:
            self._stop(unexpected_error(error, self.num_workers, was_ready=self._ready.is_set()))
        finally:
            self._launcher.end()
            self.shared_memory.close()

    def _start(self) -> Receiver:
        """Starts the workers; once more if that took too long: what a slow disk gave is in memory then."""
        try:
            receiver = launch(self._launcher, self._on_progress, self._come_first_at_exit, self.is_stopped)
        except MeshStartError as error:
            if not was_too_slow(error) or self.is_stopped():
                raise
            self._launcher.end()
            self._launcher = self._make_launcher(self._request, self.is_stopped)
            receiver = launch(self._launcher, self._on_progress, self._come_first_at_exit, self.is_stopped)
        carrier = receiver.carrier = self._launcher.carrier(self.shared_memory)
        with self._lock:
            self._carrier = carrier
            for command in self._unsent:
                WorkerGroup._send(self, command)  # they were noted when they were submitted
            self._unsent.clear()
        self._on_progress("ready", self.num_workers, self.num_workers)
        self._ready.set()
        return receiver

    def _come_first_at_exit(self) -> None:
        """Exit handlers run last in, first out, and the engine has just registered its own."""
        atexit.unregister(self.close)
        atexit.register(self.close)

    def _receive_next(self, receiver: Receiver) -> None:
        with self._lock:
            if not self._sent:
                self._changed.wait(_IDLE_LOOK_S)
            head = self._sent[0] if self._sent else None
        if head is None:
            receiver.look_around()
            return
        command, pending = head
        try:
            answers = receiver.receive(command.number, command.epoch, pending)
            outcome = self._resolver.resolve(command.epoch, command.recoverable, answers)
        except PeersHang as hang:
            outcome = self._resolver.resolve_hang(command.epoch, hang.answer)
        if outcome.must_stop and outcome.error is not None:
            self._prepare_to_stop(outcome.error)
            self.before_end(outcome.error, lambda *asked: receiver.ask(command.epoch + 1, *asked))
            self._stop(outcome.error, tell=outcome.is_new)
            return
        with self._lock:
            if self._stopped is not None:
                return
            self._sent.popleft()
            if outcome.error is not None and outcome.is_new:
                self._errors.append((command.number, outcome.error))
        self._complete(command, outcome.values, outcome.error)

    def _complete(self, command: SentCommand, values: Sequence[object], error: BaseException | None) -> None:
        self._slots.release()
        if error is not None:
            command.reply.payload = command.payload  # it may be sent to others
            command.reply.set_exception(error)
            return
        for packed in [command.payload] if isinstance(command.payload, Packed) else command.payload:
            if packed.buffers:
                self.shared_memory.release(packed.buffers)
        command.reply.set_result(values)

    def let_go(self, reply: Reply) -> None:
        """Gives back the memory of a command that ended in an error, and is not sent to others."""
        for packed in [reply.payload] if isinstance(reply.payload, Packed) else reply.payload:
            self.shared_memory.release(packed.buffers)
        reply.payload = ()

    # -- losses, see `RecoveringWorkerGroup` -----------------------------------------------------------------------

    def keep_commands(self) -> None:
        """Keeps the commands from now on, so that they can be sent to other workers again. This class does not."""

    def when_forgotten(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once no command of before can be sent again: here at once."""
        callback()

    def why_bound(self, error: BaseException) -> str:
        """Returns why the commands before the one that ended in `error` cannot be sent to workers under other plans."""
        return "without MOREH_RECOVERY=memory no copies of it are kept"

    def _replace(self, lost: WorkerLostError) -> Receiver:
        """Returns what receives from other workers, which know what those before them knew; or raises `lost`."""
        raise lost

    def _prepare_to_stop(self, error: BaseException | None) -> None:
        """Raises the error for a worker that is gone, if that explains why workers cannot go on after `error`."""

    # -- the end ---------------------------------------------------------------------------------------------------

    def is_stopped(self) -> bool:
        """Returns whether no further command is accepted: the workers were closed, or one was lost."""
        return self._stopped is not None

    def _stop(self, error: BaseException, *, tell: bool = True) -> None:
        """Accepts no further command, ends the workers, and completes what is outstanding with `error`.

        Args:
            error: why.
            tell: whether the error has still to reach the script.
        """
        with self._lock:
            if self._stopped is not None:
                return
            self._stopped = error
            if tell:
                self._errors.append((0, error))
            abandoned = [*(command for command, _ in self._sent), *self._unsent]
            self._sent.clear()
            self._unsent.clear()
            self._changed.notify_all()
        self._launcher.kill()
        for command in abandoned:
            self._complete(command._replace(payload=self.shared_memory.taken_out(command.payload)), [], error)
        self._ready.set()
