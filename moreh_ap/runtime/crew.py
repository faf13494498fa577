"""The worker processes of one mesh, from their start to their end.

Decides in which order a start goes, how a dead process is recognised, and that none is left over. Must not know
commands; it only lets the workers join each other.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moreh_ap.errors import MeshStartError, WorkerLostError
from moreh_ap.runtime import environment
from moreh_ap.runtime.bootstrap import Launch
from moreh_ap.runtime.output import WorkerOutput
from moreh_ap.runtime.worker_side import Answer, WorkerSpec

if TYPE_CHECKING:
    from moreh_ap.runtime.engine import Engine, Pending

POLL_S = 0.1  # how often a wait looks up to see whether it still makes sense
_CAUSE_S = 2.0  # how long to wait for the engine to say how a process ended
_STOP_TIMEOUT_S = 15.0

Progress = Callable[[str, int, int], object]


class Stopping(Exception):
    """Ends the background thread's work because the mesh is being closed."""


@dataclass(frozen=True)
class CrewRequest:
    """What to start; see `WorkerMesh` for the meaning of each."""

    num_workers: int
    device_type: str
    threads_per_worker: int
    executor: str
    imports: tuple[str, ...]
    start_timeout_s: float
    collective_timeout_s: float


class Crew:
    """Worker processes. All methods but `kill` are called by one thread.

    Attributes:
        pids: process ids in rank order, as far as known.
        engine: what carries messages, once there.
    """

    def __init__(self, request: CrewRequest, is_stopping: Callable[[], bool]) -> None:
        self.pids: list[int] = []
        self.engine: Engine | None = None
        self._request = request
        self._is_stopping = is_stopping
        self._output = WorkerOutput(request.num_workers)
        self._store: Any = None

    def start(self, on_progress: Progress, engine_made: Callable[[], object]) -> tuple[Engine, Pending[Answer]]:
        """Starts the processes and lets them join.

        Args:
            on_progress: told of each stage.
            engine_made: called once the engine has registered its own exit handlers.

        Returns:
            The engine, and the answers of the workers to `join`, which are still to come.

        Raises:
            MeshStartError: a process could not be started or did not answer in time.
            Stopping: the mesh is being closed.
        """
        num_workers = self._request.num_workers
        deadline_s = time.monotonic() + self._request.start_timeout_s
        on_progress("spawn", 0, num_workers)
        self._store = environment.open_store(num_workers)
        environments = [self._environment(rank) for rank in range(num_workers)]
        from moreh_ap.runtime.engine import Engine  # imports Monarch, which takes a while: here, beside the script

        launches = [Launch(rank, *self._output.descriptors(rank), self._request.imports) for rank in range(num_workers)]
        self.engine = engine = Engine(launches, environments)
        engine_made()
        for rank in range(num_workers):
            self.pids.append(self._first_answer(engine.hello(rank), rank, deadline_s))
            on_progress("connect", rank + 1, num_workers)
        self._output.workers_have_inherited()
        on_progress("link", 0, num_workers)
        return engine, engine.join([self._spec(rank) for rank in range(num_workers)])

    def find_dead(self) -> WorkerLostError | None:
        """Returns the error for the first worker whose process is gone, None while all live."""
        for rank, pid in enumerate(self.pids):
            if not _is_alive(pid):
                return self._lost(rank)
        return None

    def kill(self) -> None:
        """Ends all processes that are known so far, with their children, at once. Any thread may call this."""
        for pid in self.pids:
            try:
                # Workers lead process groups of their own. If this one should not, its group may be the script's.
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # gone already, which is what we want

    def end(self) -> None:
        """Ends everything that was started and shows the output that is left."""
        self.kill()
        if self.engine is not None:
            self.engine.stop(_STOP_TIMEOUT_S)
        self._output.close()

    def last_words(self, rank: int) -> str:
        """Returns what worker `rank` printed last, for an error message; empty if nothing."""
        tail = self._output.tail(rank)
        return f" Its last output:\n{tail}" if tail else ""

    def _environment(self, rank: int) -> dict[str, str]:
        return environment.worker_environment(
            rank,
            self._request.num_workers,
            device_type=self._request.device_type,
            threads_per_worker=self._request.threads_per_worker,
            store_port=self._store.port,
        )

    def _spec(self, rank: int) -> WorkerSpec:
        request = self._request
        return WorkerSpec(
            rank=rank,
            world_size=request.num_workers,
            device_type=request.device_type,
            executor=request.executor,
            store_port=self._store.port,
            collective_timeout_s=request.collective_timeout_s,
        )

    def _first_answer(self, pending: Pending[int], rank: int, deadline_s: float) -> int:
        from moreh_ap.runtime.engine import EngineError

        while time.monotonic() < deadline_s:
            if self._is_stopping():
                raise Stopping
            try:
                return pending.wait(POLL_S)[0]
            except TimeoutError:
                continue
            except EngineError as error:
                raise MeshStartError(
                    f"The process of worker {rank} ended while it was starting.{self.last_words(rank)}",
                    fix="python -c 'import moreh_ap, torch, monarch.actor'  # does the installation work?",
                ) from error
        raise MeshStartError(
            f"Worker {rank} has not answered {self._request.start_timeout_s:g} s after it was started."
            f"{self.last_words(rank)}"
        )

    def _lost(self, rank: int) -> WorkerLostError:
        """Makes the error for a dead worker, giving the engine a moment to learn how it died."""
        assert self.engine is not None, "pids are known only after the engine is made"
        deadline_s = time.monotonic() + _CAUSE_S
        cause = self.engine.cause_of_death(rank)
        while cause is None and time.monotonic() < deadline_s and not self._is_stopping():
            time.sleep(POLL_S)
            cause = self.engine.cause_of_death(rank)
        by_signal = re.fullmatch(r"Killed\(sig=(\d+)\)", cause or "")
        number = int(by_signal.group(1)) if by_signal else None
        how = f"killed by signal {number}, {signal.strsignal(number)}" if number else cause or "cause unknown"
        memory = "dmesg | grep -i 'out of memory'  # the system kills for memory: try a smaller batch or model"
        return WorkerLostError(
            f"Worker {rank} of {len(self.pids)} (process {self.pids[rank]}) died: {how}.{self.last_words(rank)}",
            fix=memory if number == signal.SIGKILL else "",
        )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
