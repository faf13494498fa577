"""The processes of one worker group, from their start to their end.

Decides in which order a start goes, how a dead process is recognised, and that none is left over. Must not know
commands; it only lets the workers join each other.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moreh_ap.errors import MeshStartError, WorkerLostError
from moreh_ap.local.script_end import exit_waits
from moreh_ap.runtime import engine_variables, worker_environment
from moreh_ap.runtime.bootstrap import Launch
from moreh_ap.runtime.child_process import Child, RemoteChild, how_ended, kill_group
from moreh_ap.runtime.engine_error import EngineError, start_error
from moreh_ap.runtime.forking import warm_client
from moreh_ap.runtime.forking.early_imports import is_needed
from moreh_ap.runtime.hangs.watched_workers import WatchedWorkers, WorkersHere
from moreh_ap.runtime.host.agent_process import AgentProcess
from moreh_ap.runtime.recovery.copy_memory import CopyKeeper, CopyMemory
from moreh_ap.runtime.recovery.other_devices import Joined
from moreh_ap.runtime.relay.carrier import Carrier
from moreh_ap.runtime.relay.worker_answer import Answer
from moreh_ap.runtime.relay.worker_links import WorkerLinks
from moreh_ap.runtime.shared_memory import SharedMemory
from moreh_ap.runtime.worker.actor import WorkerSpec
from moreh_ap.runtime.worker_output import WorkerOutput

if TYPE_CHECKING:
    from moreh_ap.runtime.engine import Engine, Pending

POLL_S = 0.1  # how often a wait looks up to see whether it still makes sense
START_POLL_S = 0.02  # the same while processes start
_CAUSE_S = 4.0  # how long to wait for somebody to say how a process ended; the engine may never do so
_COLLECTED_S = 10.0  # how long killed workers may take to be gone; it takes milliseconds
_STOP_TIMEOUT_S = 15.0

Progress = Callable[[str, int, int], object]


class Stopping(Exception):
    """Ends the background thread's work because the worker group is being closed."""


@dataclass(frozen=True)
class LaunchRequest:
    """The workers to start; see `WorkerGroup` for the meaning of each attribute."""

    num_workers: int
    device_type: str
    threads_per_worker: int
    executor: str
    imports: tuple[str, ...]
    start_timeout_s: float
    collective_timeout_s: float
    shared_memory_fd: int
    visible_devices: str = ""
    copies: CopyMemory | None = None


class Launcher:
    """Worker processes. All methods but `kill` are called by one thread.

    Attributes:
        engine: what carries messages, once there.
    """

    def __init__(
        self, request: LaunchRequest, is_stopping: Callable[[], bool], agent_variables: Mapping[str, str] | None = None
    ) -> None:
        self._agent_variables = agent_variables or {}
        self.engine: Engine | None = None
        self._request, self._is_stopping = request, is_stopping
        self._output = WorkerOutput([self._label(rank) for rank in range(request.num_workers)])
        self._children: dict[int, Child | RemoteChild] = {}
        self._pid_reader, self._pid_writer = os.pipe()
        os.set_blocking(self._pid_reader, False)
        engine_variables.add(self._variables())  # in this thread, not in the one that imports the engine
        self._agent: AgentProcess | None = None
        self._launches: list[Launch] = []
        self._links: WorkerLinks | None = None
        self._num_starts = 1

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order, as far as known."""
        return [child.pid for _, child in sorted(self._children.items())]

    @property
    def watched(self) -> WatchedWorkers:
        """The workers, which run."""
        return WorkersHere(dict(enumerate(self.pids)))

    @property
    def copies(self) -> CopyKeeper:
        """Who keeps the copies of what workers hold, where others can take over: this process."""
        assert self._request.copies is not None, "others can take over"
        return self._request.copies

    def start(self, on_progress: Progress, engine_made: Callable[[], object]) -> tuple[Engine, Pending[Answer]]:
        """Starts the processes and lets them join.

        Args:
            on_progress: told of each stage.
            engine_made: called once the engine has registered its own exit handlers.

        Returns:
            The engine, and the answers of the workers to `join`, which are still to come.

        Raises:
            MeshStartError: a process could not be started or did not answer in time.
            Stopping: the worker group is being closed.
        """
        num_workers = self._request.num_workers
        on_progress("spawn", 0, num_workers)
        if self._num_starts == 1:
            self._start_agents()
        with exit_waits():
            try:
                if self._is_stopping():
                    raise Stopping
                from moreh_ap.runtime.engine import Engine  # imports Monarch, which takes a while: beside the script

                engine = Engine(self._agents(), self._answers())
                self._await_imports()
                if self._is_stopping():
                    raise Stopping
                self._listen()
                ranks = range(num_workers)
                # Numbers of descriptors, which the agent keeps open after this process has given them back.
                self._launches = self._launches or [self._launch(rank) for rank in ranks]
                commands = [self._command(rank) for rank in ranks]
                engine.start(commands, self._launches, [self._environment(rank) for rank in ranks])
                self.engine = engine
            except EngineError as error:
                raise MeshStartError(
                    f"{self._supervisor()} does not answer: {error}", fix="run the script again"
                ) from error
            finally:
                engine_variables.take_away()
            engine_made()
        try:
            joining = engine.join([self._spec(rank) for rank in range(num_workers)])
        except EngineError as error:
            raise start_error(error) from error
        self._await_pids(joining, on_progress)
        self._workers_run()
        on_progress("link", 0, num_workers)
        return engine, joining

    def find_dead(self) -> WorkerLostError | None:
        """Returns the error for the agent or the first worker whose process is gone, None while all live."""
        if self._agent is not None and (code := self._agent.exit_code()) is not None:
            return WorkerLostError(f"{self._supervisor()} died: {how_ended(code)}. The workers ended with it.")
        for rank, child in self._children.items():
            if not child.is_alive():
                return self._lost(rank)
        return None

    def prepare_again(self) -> str:
        """Ends the workers so that `start` may be called once more, with others of the same warm parent.

        The engine's own end of the old ones is not waited for: it takes seconds where one was killed.

        Returns:
            Why that is not possible, empty if it is; this launcher is of no use then.
        """
        gone = "what starts the workers has ended"
        if self._agent is None or not self._agent.can_go_on() or self.engine is None:
            return gone
        self.kill()
        deadline_s = time.monotonic() + _COLLECTED_S
        while any(child.is_alive() for child in self._children.values()):
            if time.monotonic() > deadline_s or self._is_stopping() or not self._agent.can_go_on():
                return gone  # if it is late, what collects them is stopped
            time.sleep(START_POLL_S)
        self._agent = self._agent.going_on()
        self._close_links()
        self._children, self.engine = {}, None
        self._num_starts += 1
        return ""

    def copied(self) -> Joined | None:
        """Is told that there is a copy of what workers hold; returns what can be used from now on that was not."""
        return None

    def restored(self) -> None:
        """Is told that others hold what a copy has, which is where they are from now on."""

    def leave_agents(self, *, of_joined: bool = False) -> None:
        """Has `end` leave what keeps copies of what workers hold to the launcher of others, with what has joined if
        `of_joined`. Any thread may call this."""

    def kill(self) -> None:
        """Ends all processes that are known so far, with their children, at once. Any thread may call this."""
        for pid in self.pids:
            kill_group(pid)

    def end(self) -> None:
        """Ends everything that was started and shows the output that is left."""
        self._read_pids()
        self.kill()
        if self.engine is not None:
            self.engine.stop(self._stop_timeout_s())
        if self._agent is not None:
            self._agent.end()
        self._close_links()
        self._output.close()
        os.close(self._pid_reader)
        os.close(self._pid_writer)

    def _close_links(self) -> None:
        for child in self._children.values():
            child.close()
        if self._links is not None:
            self._links.close()

    def last_words(self, rank: int) -> str:
        """Returns what worker `rank` printed last, for an error message; empty if nothing."""
        tail = self._output.tail(rank)
        return f" Its last output:\n{tail}" if tail else ""

    def provide(self, files: Sequence[str]) -> None:
        """Has every worker find files that this process can read. Waits where another host lacks one."""

    def take(self, written: Mapping[int, tuple[str, str]]) -> dict[int, str]:
        """Moves files that workers have written in folders of their hosts alone to this machine.

        Args:
            written: By rank the path there, and the path here; where that is empty, the file is only removed.

        Returns:
            The digest of each that has arrived, by rank.
        """
        assert not written, "every worker of this machine writes where it is told to"
        return {}

    def carrier(self, memory: SharedMemory) -> Carrier:
        """Returns what carries commands, once workers have joined.

        Args:
            memory: Told how workers on other hosts get large values.

        Raises:
            MeshStartError: A host cannot be reached, or a worker has ended meanwhile.
        """
        assert self.engine is not None and self._links is not None, "workers have joined"
        try:
            self._links.let_in()
            self.engine.serve()
        except EngineError as error:
            raise start_error(error) from error
        return self._links

    # -- this machine; `hosts_launcher` has others -----------------------------------------------------------------

    def _variables(self) -> Mapping[str, str]:
        """Returns variables that the engine needs in this process beyond `engine_variables`."""
        return {}

    def _stop_timeout_s(self) -> float:
        has_agent = self._agent is not None and self._agent.exit_code() is None
        return _STOP_TIMEOUT_S if has_agent else 0.0  # without one the engine's own end never comes

    def _label(self, rank: int) -> str:
        """Returns what a worker is called in front of its output and in errors."""
        return f"worker {rank}"

    def describe(self, rank: int) -> str:
        """Returns what a worker is called in errors."""
        return f"Worker {rank} of {self._request.num_workers} (process {self._children[rank].pid}){self.place_of(rank)}"

    def place_of(self, rank: int) -> str:
        """Returns where a worker is: " on " and its host; empty on this machine."""
        return ""

    def _start_agents(self) -> None:
        """Starts what starts workers."""
        inherited = [self._pid_writer, self._request.shared_memory_fd, *self._output.write_ends()]
        environments = [self._environment(rank) for rank in range(self._request.num_workers)]
        variables = worker_environment.of_all(environments) | dict(self._agent_variables)
        self._agent = AgentProcess(inherited, self._request.imports, variables)

    def _agents(self) -> Sequence[str]:
        """Returns where the engine of each agent listens, once it does."""
        assert self._agent is not None, "started"
        return [self._agent.address(self._request.start_timeout_s)]

    def _answers(self) -> str:
        """Returns where the engine takes answers of other hosts; empty: there are none."""
        return ""

    def _await_imports(self) -> None:
        """Waits until workers can be started in no time."""
        assert self._agent is not None, "started"
        self._agent.await_imports(self._is_stopping)

    def _command(self, rank: int) -> Sequence[str]:
        """Returns the arguments of Python with which a worker is started."""
        assert self._agent is not None, "started"
        return ["-S", warm_client.__file__, *self._agent.warm]

    def _listen(self) -> None:
        """Opens the socket to which workers connect for commands."""
        assert self._agent is not None, "started"
        self._links = WorkerLinks(str(self._agent.folder / f"commands{self._num_starts}"), self._request.num_workers)

    def _imports(self) -> tuple[str, ...]:
        """Returns what a worker should import early."""
        return tuple(filter(is_needed, self._request.imports))

    def _supervisor(self) -> str:
        assert self._agent is not None, "started"
        return f"The process that supervises the workers (process {self._agent.pid})"

    def _workers_run(self) -> None:
        """Gives back what all workers have inherited."""
        self._output.workers_have_inherited()

    def _launch(self, rank: int) -> Launch:
        return Launch(rank, self._pid_writer, *self._output.descriptors(rank), self._imports())

    def _environment(self, rank: int) -> Mapping[str, str | None]:
        return worker_environment.worker_environment(
            rank,
            self._request.num_workers,
            device_type=self._request.device_type,
            visible_devices=self._request.visible_devices,
            threads_per_worker=self._request.threads_per_worker,
        )

    def _spec(self, rank: int) -> WorkerSpec:
        request = self._request
        return WorkerSpec(
            rank=rank,
            world_size=request.num_workers,
            device_type=request.device_type,
            executor=request.executor,
            shared_memory_fd=request.shared_memory_fd,
            store_path="" if self._agent is None else str(self._agent.folder / f"store{self._num_starts}"),
            collective_timeout_s=request.collective_timeout_s,
            commands_path="" if self._links is None else self._links.path,
            copies=() if request.copies is None else request.copies.files,
            index=rank,
        )

    def _await_pids(self, joining: Pending[Answer], on_progress: Progress) -> None:
        """Waits until every process runs. Each says so at once, long before it has imported what it needs."""
        num_workers, timeout_s = self._request.num_workers, self._request.start_timeout_s
        deadline_s = time.monotonic() + timeout_s
        told = 0
        while told < num_workers:
            if self._is_stopping():
                raise Stopping
            self._read_pids()
            while told < len(self._children):
                told += 1
                on_progress("connect", told, num_workers)
            try:
                joining.wait(START_POLL_S)
            except TimeoutError:
                pass
            except EngineError as error:
                raise start_error(error) from error
            if time.monotonic() > deadline_s:
                missing = sorted(set(range(num_workers)) - set(self._children))
                raise MeshStartError(f"The processes of workers {missing} did not run {timeout_s:g} s after the start.")

    def _read_pids(self) -> None:
        try:
            lines = os.read(self._pid_reader, 65536).decode().splitlines()
        except BlockingIOError:
            return
        self._children.update((int(rank), Child(int(pid))) for rank, pid in map(str.split, lines))

    def _lost(self, rank: int) -> WorkerLostError:
        """Makes the error for a dead worker, giving kernel and engine a moment to tell how it died."""
        assert self.engine is not None, "pids are known only after the engine is made"
        child = self._children[rank]
        deadline_s = time.monotonic() + _CAUSE_S
        code, report = child.exit_code(), self.engine.cause_of_death(rank)
        while code is None and report is None and time.monotonic() < deadline_s and not self._is_stopping():
            time.sleep(POLL_S)
            code, report = child.exit_code(), self.engine.cause_of_death(rank)
        by_signal = re.fullmatch(r"Killed\(sig=(\d+)\)", report or "")
        if code is None and by_signal:
            code = -int(by_signal.group(1))
        how = (report or "cause unknown") if code is None else how_ended(code)
        memory = "dmesg | grep -i 'out of memory'  # the system kills for memory: try a smaller batch or model"
        return WorkerLostError(
            f"{self.describe(rank)} died: {how}.{self.last_words(rank)}",
            fix=memory if code == -signal.SIGKILL else "",
        )
