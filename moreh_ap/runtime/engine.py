"""PyTorch Monarch, and the only module that imports it.

Decides how worker processes are started through it, how one message reaches them, and how its answers are waited for.
Must not know what the messages mean. Everything the engine does by default that a script would notice is undone here:
its banner, its log file, its prefix on log records, its reaction to a lost process (an interrupt in the main thread),
and its environment variables (`engine_variables`). Importing this module imports Monarch, so nothing imports it before
a mesh is made; workers import it too, to find the actors' classes.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import multiprocessing.util
import os
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import monarch.actor as ma
from monarch.config import configure

from moreh_ap.hosts.ways import ENGINE_BANNER
from moreh_ap.native_output import without_lines
from moreh_ap.runtime.bootstrap import Launch
from moreh_ap.runtime.engine_error import EngineError
from moreh_ap.runtime.host import private_sockets
from moreh_ap.runtime.relay.worker_answer import Answer, Wire, from_wire, to_wire
from moreh_ap.runtime.worker.actor import Trouble, WorkerSide, WorkerSpec

# In IPython, Monarch forwards logs by default; with that on, stopping hangs once a worker has died.
configure(enable_log_forwarding=False, process_exit_timeout="3s")
ma.config.prefix_python_logs_with_actor = False

# What Monarch reported of lost processes, newest last: a text each, naming the actors concerned.
_faults: collections.deque[str] = collections.deque(maxlen=64)
ma.unhandled_fault_hook = lambda failure: _faults.append(failure.report())

T = TypeVar("T")


def _leave_running_loops() -> None:
    """Has Monarch not close the event loop of a thread that waits for an answer as Python ends, which would raise."""
    kind = getattr(sys.modules.get(ma.returns_future.__module__), "_ThreadLoop", None)
    if kind is not None:
        close = kind.__del__
        kind.__del__ = lambda loop: None if loop.loop.is_running() else close(loop)


_leave_running_loops()
_logger = logging.getLogger(__name__)
_ATTACH_TIMEOUT_S = 15.0  # an agent that listens answers in 0.25 s, on a busy machine too, or never
_FLUSH_S = 0.02  # each of two flushes at the end, when nobody is left to whom the engine could send anything
_SHUTDOWN_S = 1.0  # as Monarch's own exit handler has it
_transports: list[str] = []
_transport_lock = threading.Lock()

# A worker process belongs to one mesh. Its two actors, each on a thread of its own, meet here.
_side = WorkerSide()


class CommandActor(ma.Actor):
    """Joins the others, and executes commands, one after the other, on its own thread."""

    @ma.endpoint
    def join(self, spec: WorkerSpec) -> Wire:
        return to_wire(_side.join(spec))

    @ma.endpoint
    def serve(self) -> None:
        """Executes the commands that come over its connection, until that ends."""
        _side.serve()


class WatchActor(ma.Actor):
    """Answers while a command is being executed, or hangs."""

    @ma.endpoint
    def trouble(self) -> tuple[int, int, Wire] | None:
        """Returns number, epoch and answer of the last command that failed."""
        trouble = _side.trouble()
        return None if trouble is None else (trouble.number, trouble.epoch, to_wire(trouble.answer))


class Pending(Generic[T]):
    """Answers that are on their way.

    Args:
        futures: Monarch's, either one for all workers or one a worker.
        decode: makes what is waited for of what a worker sent.
    """

    def __init__(self, futures: Sequence[Any], decode: Callable[[Any], T]) -> None:
        self._futures = collections.deque(futures)
        self._decode = decode
        self._values: list[T] = []

    def wait(self, timeout_s: float) -> list[T]:
        """Returns the answers in rank order. May be called again after a time-out.

        Raises:
            TimeoutError: not all answers are in.
            EngineError: an answer will never come.
        """
        while self._futures:
            try:
                value = self._futures[0].get(timeout=timeout_s)
            except TimeoutError:
                raise
            except Exception as error:  # workers answer their own exceptions, so this one is the engine's
                raise EngineError(str(error)) from error
            self._futures.popleft()
            values = value.values() if isinstance(value, ma.ValueMesh) else [value]
            self._values.extend(self._decode(value) for value in values)
        return self._values


class Engine:
    """Worker processes and the two actors in each.

    Args:
        agents: where the engines of the agents listen, one a host.
        answers: where this process takes answers from other hosts; empty: from this machine alone.

    Raises:
        EngineError: An agent does not answer.
    """

    def __init__(self, agents: Sequence[str], answers: str = "") -> None:
        self._hosts = _attach(agents, answers)
        self._num_hosts = len(agents)
        # Names are part of fault reports; unique ones tell the meshes of a process apart.
        self._name = f"worker-{uuid.uuid4().hex[:8]}"
        self._num_workers = 0

    def start(
        self,
        commands: Sequence[Sequence[str]],
        launches: Sequence[Launch],
        environments: Sequence[Mapping[str, str | None]],
    ) -> None:
        """Starts the processes in the background.

        Args:
            commands: the arguments of Python with which each worker is started, in rank order; its launch follows.
            launches: the command-line values of each worker, in rank order; each host has as many.
            environments: variables to set for each worker; None: not to set.

        Raises:
            EngineError: An agent has ended.
        """
        self._num_workers = len(launches)
        per_host = self._num_workers // self._num_hosts
        with _lost_messages():
            self._procs = self._hosts.spawn_procs(
                per_host={"gpus": per_host}, bootstrap_command=_bootstrap_commands(commands, launches, environments)
            )
            self._workers: Any = self._procs.spawn(self._name, CommandActor)
            self._watches: Any = self._procs.spawn(f"{self._name}-watch", WatchActor)
        self._places = [_place(rank, self._num_hosts, per_host) for rank in range(self._num_workers)]
        self._each = [self._workers.slice(**place) for place in self._places]
        self._each_watch = [self._watches.slice(**place) for place in self._places]

    def join(self, specs: Sequence[WorkerSpec]) -> Pending[Answer]:
        """Lets every worker join the process group.

        Raises:
            EngineError: A worker has ended.
        """
        with _lost_messages():
            return Pending([each.join.call_one(spec) for each, spec in zip(self._each, specs, strict=True)], from_wire)

    def serve(self) -> None:
        """Has every worker take its commands from its connection from now on. Does not wait.

        Raises:
            EngineError: A worker has ended.
        """
        with _lost_messages():
            self._serving = self._workers.serve.call()  # kept: it ends with the workers, of which others tell

    def trouble(self, rank: int) -> Pending[Trouble | None]:
        """Asks worker `rank`, busy or not, for its last failure.

        Raises:
            EngineError: A worker has ended.
        """
        with _lost_messages():
            return Pending(
                [self._each_watch[rank].trouble.call_one()],
                lambda wire: None if wire is None else Trouble(wire[0], wire[1], from_wire(wire[2])),
            )

    def cause_of_death(self, rank: int) -> str | None:
        """Returns what is known about the end of worker `rank`'s process, such as "Killed(sig=9)"."""
        place = r"/\d+, ".join(f"'{axis}': {index}" for axis, index in self._places[rank].items())
        concerned = re.compile(rf"{self._name}(-watch)?{{{place}/")
        for report in reversed(_faults):
            if concerned.search(report):
                found = re.search(r"failed: (.+)", report)
                return found.group(1).strip() if found else report.strip()
        return None

    def stop(self, timeout_s: float) -> None:
        """Ends the processes, or lets the engine find out that they have been killed, which is quicker."""
        try:
            self._procs.stop().get(timeout=timeout_s)
        except Exception:  # the engine may not understand an end that it did not bring about; the kernel's word counts
            _logger.debug("the engine could not end the worker processes in an orderly way", exc_info=True)


@contextlib.contextmanager
def _lost_messages() -> Iterator[None]:
    """Has what the engine raises inside, since a process is gone to which it should send, be an `EngineError`."""
    try:
        yield
    except Exception as error:  # of classes that the engine does not tell
        raise EngineError(str(error)) from error


def _place(rank: int, num_hosts: int, per_host: int) -> dict[str, int]:
    """Returns where a worker is in Monarch's mesh, whose first axis counts hosts where it has several."""
    place = {"gpus": rank % per_host}
    return {"hosts": rank // per_host, **place} if num_hosts > 1 else place


def _bootstrap_commands(
    commands: Sequence[Sequence[str]], launches: Sequence[Launch], environments: Sequence[Mapping[str, str | None]]
) -> Callable[[Any], Any]:
    """Returns a function from a place in the mesh to the command that starts a worker there: ours, with its launch,
    followed by what Monarch would have run itself."""

    def command(point: Any) -> Any:
        engine_command = ma.default_bootstrap_cmd()
        engine_command.args = [*commands[point.rank], str(launches[point.rank]), *engine_command.args]
        # The agent's own folder for temporary files is for sockets, and goes with it.
        return engine_command.with_env({"TMPDIR": os.environ.get("TMPDIR"), **environments[point.rank]})

    return command


def _attach(agents: Sequence[str], answers: str) -> Any:
    """Returns Monarch's handle of the agents at these addresses.

    Raises:
        EngineError: One does not answer.
    """
    with _transport_lock, without_lines(ENGINE_BANNER):
        first, before = not _transports, private_sockets.abstract_listeners()
        if first:
            _open_transport(answers or f"ipc://{private_sockets.run_folder()}/controller")
        hosts = ma.attach_to_workers(ca="trust_all_connections", workers=list(agents))
        try:
            hosts.initialized.get(timeout=_ATTACH_TIMEOUT_S)
        except TimeoutError as error:
            places = ", ".join(agent.rpartition("@")[2] for agent in agents)  # without the names that strangers lack
            raise EngineError(f"Timeout: no answer from {places} in {_ATTACH_TIMEOUT_S:g} s") from error
        finally:
            if first:
                atexit.register(_shut_down)  # before Monarch's handler, which finds nothing left to do
                private_sockets.close(private_sockets.abstract_listeners() - before)
        return hosts


def _shut_down() -> None:
    """Shuts the engine down at the end of this process, after all workers and agents have ended.

    Monarch's own exit handler waits 0.3 s for each of two flushes to peers that are gone, and prints a traceback where
    a busy machine takes longer than a second.
    """
    with contextlib.suppress(TimeoutError):  # this process ends
        ma.shutdown_context(host_timeout=_FLUSH_S).get(timeout=_SHUTDOWN_S)


def _open_transport(address: str) -> None:
    """Has Monarch take answers at an address, once a process: a socket that only this user can reach, or one that asks
    for a certificate of this run.

    Loader processes that the script has forked hold Monarch's connections open, and its threads would outlive its own
    exit handlers; one that comes back from native code while Python ends aborts the process. So what multiprocessing
    does at exit, to end such processes, is done before those handlers, which run last in, first out.
    """
    ma.enable_transport(address)
    _transports.append(address)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
