"""The processes of a worker group on several hosts, from their start to their end.

Decides what differs from one machine: agents are told what to do over their connections, which also carry what workers
print, how they end, and the store through which they meet. Must not know commands, nor how hosts are compared.

[Note: other hosts]
Every host has equally many workers. So where a host is lost, or others have joined, all workers are dealt anew: those
that are on another host than before get their copies from one that has them (`runtime/recovery/hosts_in_use.py`). If
there are more workers on more hosts, or others under another plan, another group has them, for which agents and their
copies are left.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from moreh_ap.errors import MeshStartError, WorkerLostError
from moreh_ap.hosts.channel import Message
from moreh_ap.hosts.credentials import context_of
from moreh_ap.protocol.messages.memory_files import MemoryFile
from moreh_ap.runtime import worker_environment
from moreh_ap.runtime.bootstrap import Launch
from moreh_ap.runtime.child_process import RemoteChild
from moreh_ap.runtime.engine_error import EngineError
from moreh_ap.runtime.forking import warm_client
from moreh_ap.runtime.forking.early_imports import EarlyImports
from moreh_ap.runtime.hangs import hang_watch
from moreh_ap.runtime.hangs.watched_workers import WatchedWorkers
from moreh_ap.runtime.hangs.workers_of_hosts import WorkersOfHosts
from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError
from moreh_ap.runtime.host.host_joining import Hosts, run_credentials
from moreh_ap.runtime.host.serving import Serving
from moreh_ap.runtime.host.usage_of_hosts import UsageOfHosts
from moreh_ap.runtime.launcher import POLL_S, Launcher, LaunchRequest, Stopping
from moreh_ap.runtime.recovery.agents_left import AgentsLeft
from moreh_ap.runtime.recovery.copy_memory import CopyKeeper
from moreh_ap.runtime.recovery.host_copies import HostCopies, told_to_agents
from moreh_ap.runtime.recovery.hosts_in_use import fewer_on, joined_by, taken_of, why_fewer_on, why_none_on
from moreh_ap.runtime.recovery.joining_hosts import JoiningHosts
from moreh_ap.runtime.recovery.other_devices import Joined, NoOthersError
from moreh_ap.runtime.relay.carrier import Carrier
from moreh_ap.runtime.relay.command_links import CommandLinks
from moreh_ap.runtime.shared_memory import SharedMemory
from moreh_ap.runtime.store.store_server import StoreServer
from moreh_ap.runtime.worker.actor import WorkerSpec

if TYPE_CHECKING:
    from moreh_ap.runtime.host.host_pool import HostPool

_WHY_S = 2.0  # ssh may have last words of why a host has gone
_REPORTS_PER_HANG = 6  # of an agent, in the time after which a worker counts as hanging
_STOP_S = 0.5  # the engine's own end never comes where an agent has ended

_STORE = "moreh_ap.runtime.store.host_store:HostStore"


class HostsLauncher(Launcher):
    """Worker processes on several hosts; ranks go host by host.

    Args:
        request: What to start.
        is_stopping: Whether the worker group is being closed.
        pool: The hosts of the accelerator.
    """

    def __init__(self, request: LaunchRequest, is_stopping: Callable[[], bool], pool: HostPool) -> None:
        self._pool = pool
        self._connections: list[HostConnection] = []  # until agents are asked to serve
        self._new: list[HostConnection] = []  # those of them whose workers have not joined yet
        self._kept_by: list[HostConnection] = []  # those that took the last copy
        self._joining: JoiningHosts | None = None
        self._with_joined: list[HostConnection] = []  # those used once others have joined
        self._answers_at = ""
        self._per_host = request.num_workers // len(pool.hosts)
        self._threads = request.threads_per_worker, len(pool.hosts)
        self._served: dict[str, Serving] = {}
        self._start_number = pool.next_start()
        self._store = StoreServer(self._start_number)
        self._host_links: CommandLinks | None = None
        self._early = EarlyImports(request.imports, self._tell_warm_parents)
        self._warm: set[str] = set()  # hosts that can fork workers
        self._ended, self._left = threading.Event(), AgentsLeft()
        super().__init__(request, is_stopping)

    @property
    def copies(self) -> CopyKeeper:
        return HostCopies(self._connections, self._served.values(), self._per_host, self._request.copies)

    @property
    def watched(self) -> WatchedWorkers:
        return WorkersOfHosts(self._connections, self._per_host, self._start_number)

    def find_dead(self) -> WorkerLostError | None:
        return self._lost_host() or super().find_dead()

    def prepare_again(self) -> str:
        """Has the agents end their workers, so that they can fork others; they keep the copies of what these held.

        Where hosts are lost or have joined, workers are dealt anew. See [Note: other hosts].
        """
        if self._num_starts == 1 and not self._kept_by and len(self._served) < max(1, len(self._connections)):
            return "the agents of its hosts never served"
        num_workers = self._request.num_workers
        for one in self._new:
            one.give_up("its workers could not be started")
        left = [one for one in self._connections if one.lost() is None]
        waiting = [] if self._joining is None else self._joining.waiting()
        hosts = [*left, *taken_of(waiting, len(left), num_workers)]
        if hosts != self._connections:
            reason = why_none_on(hosts, self._kept_by)
            if reason:
                return reason
            self._look_for_room(hosts)
            self._go_on_with(hosts)
        if self._host_links is not None:
            self._host_links.close()
        self._num_starts += 1
        self._start_number = self._pool.next_start()
        self._store = StoreServer(self._start_number)
        self._served.clear()
        self._tell_all()
        self._await(self._served, "have not ended their workers")
        self._children, self.engine = {}, None
        return ""

    def copied(self) -> Joined | None:
        self._kept_by = list(self._connections)
        if self._joining is None:
            return None
        waiting, num_workers = self._joining.waiting(), self._request.num_workers
        self._with_joined, joined = joined_by(self._connections, waiting, num_workers, self._pool.num_workers_on)
        return joined

    def restored(self) -> None:
        self._kept_by = self._kept_by and list(self._connections)

    def leave_agents(self, *, of_joined: bool = False) -> None:
        self._left.leave(self._with_joined if of_joined else ())

    def _look_for_room(self, hosts: list[HostConnection]) -> None:
        """Leaves the agents of hosts for others if these are going to be fewer.

        Raises:
            NoOthersError: Not all workers can be on them.
        """
        num_workers, device_type = self._request.num_workers, self._request.device_type
        reason = why_fewer_on(hosts, num_workers, device_type)
        if reason:
            self._left.leave(hosts)
            fewer, names = fewer_on(hosts, num_workers, device_type), tuple(one.host for one in hosts)
            raise NoOthersError.on_hosts(f"{reason[0].upper()}{reason[1:]}.", fewer, names)

    def kill(self) -> None:
        self._ended.set()
        self._early.stop()
        if self._host_links is not None:
            self._host_links.close()
        for one in () if self._left.are_left else self._connections:
            with contextlib.suppress(HostLostError):
                one.send("end")

    def end(self) -> None:
        self.kill()
        if self._joining is not None:
            self._joining.take(self._left.hosts)
            self._joining.close()
        if self._left.are_left:
            self._pool.give_back(self._left.for_next(self._connections), self._kept_by)
            self.engine = None
        else:
            for one in self._connections:
                one.end()  # what its workers printed last has arrived then
        super().end()

    def provide(self, files: Sequence[str]) -> None:
        self._pool.will_provide(files)  # before a host is found to be lost: others have them in any case
        self._pool.provide_all(self._connections, files)

    def take(self, written: Mapping[int, tuple[str, str]]) -> dict[int, str]:
        return self._pool.take_from_all(self._connections, written)

    def carrier(self, memory: SharedMemory) -> Carrier:
        assert self.engine is not None, "workers have joined"
        places = [(one.address, self._served[one.host].commands_port) for one in self._connections]
        shown = context_of(run_credentials.variables, is_server=False)
        try:
            self._host_links = links = CommandLinks(places, self._per_host, shown, self._has_no_commands)
        except EngineError as error:
            raise MeshStartError(str(error), fix=f"moreh-ap doctor --hosts {','.join(self._pool.names)}") from error
        memory.carry_by(links.keep, self._per_host, self._connections[0].read_value)  # all have it
        self.engine.serve()
        self._new = []
        if self._pool.others_may_join and self._joining is None and self._request.copies is not None:
            self._joining = JoiningHosts(self._pool, lambda: self._connections)
        return links

    # -- what differs from one machine -----------------------------------------------------------------------------

    def _lost_host(self) -> WorkerLostError | None:
        for index, one in enumerate(self._connections):
            reason = one.lost()
            if reason is not None and not self._ended.is_set():
                ranks = ", ".join(str(index * self._per_host + rank) for rank in range(self._per_host))
                return WorkerLostError(
                    f"The host {one.name} is lost, and the workers on it ({ranks}): {reason}",
                    fix=f"moreh-ap doctor --hosts {one.name}",
                )
        return None

    def _stop_timeout_s(self) -> float:
        return _STOP_S

    def _variables(self) -> Mapping[str, str]:
        return run_credentials.variables

    def _host(self, rank: int) -> HostConnection:
        return self._connections[rank // self._per_host]

    def _label(self, rank: int) -> str:
        return f"{self._pool.names[rank // self._per_host]}, worker {rank}"

    def place_of(self, rank: int) -> str:
        return f" on {self._host(rank).name}"

    def _supervisor(self) -> str:
        return "A host's agent"

    def _start_agents(self) -> None:
        hosts = self._pool.take()
        self._connections, self._answers_at = hosts.connections, hosts.controller_address
        self._kept_by, self._pool.kept_by = self._pool.kept_by, []
        self._new = [one for one in hosts.connections if self._kept_by and one not in self._kept_by]
        self._listen_to_usage()
        for one in self._connections:
            one.on_message = self._handler(one)
        self._tell_all()
        self._early.begin()

    def _tell_all(self) -> None:
        """Has all agents let workers in, which find the files of before."""
        for one in self._connections:
            self._tell(one)
        self._pool.provide_all(self._connections, self._pool.provided())

    def _tell(self, one: HostConnection) -> None:
        """Has an agent serve, if it does not, and let workers in."""
        first = self._connections.index(one) * self._per_host
        ranks = list(range(first, first + self._per_host))
        asked: dict[str, Any] = {
            "start": self._start_number,
            "ranks": ranks,
            "imports": self._early.now,
            "environment": worker_environment.of_all([self._environment(rank) for rank in ranks]),
            **told_to_agents(self._request.copies, self._request.num_workers),
            "alive_s": hang_watch.HANG_S / _REPORTS_PER_HANG,
        }
        with contextlib.suppress(HostLostError):  # who waits for it says so
            if one.serves:
                one.send("again", **asked)
            else:
                one.serves = True
                made = run_credentials.of_hosts(Hosts([one], [], self._answers_at))[one.address]
                one.send("serve", credentials=asdict(made), working_folder=os.getcwd(), **asked)

    def _listen_to_usage(self) -> None:
        self._usage = UsageOfHosts(self._per_host, self._request.threads_per_worker, self._request.device_type)
        # All hosts speak equally often: once for all.
        self._connections[0].on_usage = lambda: self._pool.on_usage(self._usage.of_all(self._connections))

    def _go_on_with(self, hosts: list[HostConnection]) -> None:
        """Has these hosts have all workers from now on."""
        num_workers, lost = self._request.num_workers, [one for one in self._connections if one not in hosts]
        for one in lost:
            one.end_soon()
        self._new = [one for one in hosts if one not in self._connections]
        for one in self._new:
            one.on_message = self._handler(one)
        if self._joining is not None:
            self._joining.take(self._new)
        threads, of_hosts = self._threads
        self._request = replace(self._request, threads_per_worker=max(1, threads * len(hosts) // of_hosts))
        self._connections, self._per_host = hosts, num_workers // len(hosts)
        self._pool.use(hosts)
        self._launches = []
        self._warm.clear()
        self._listen_to_usage()
        self._output.rename([self._label(rank) for rank in range(num_workers)])
        if lost:
            self._pool.say(f"all {num_workers} workers are on {', '.join(self._pool.names)} from now on")

    def _tell_warm_parents(self, module: str) -> None:
        for one in self._connections:
            with contextlib.suppress(HostLostError):  # `_await` says so
                one.send("import", module=module)

    def _agents(self) -> Sequence[str]:
        self._await(self._served, "did not serve")
        return [self._served[one.host].address for one in self._connections]

    def _await_imports(self) -> None:
        self._await(self._warm, "did not import what workers need")
        self._early.stop()

    def _await(self, found: Collection[str], failure: str) -> None:
        """Waits until all hosts are found."""
        deadline_s = time.monotonic() + self._request.start_timeout_s
        while len(found) < len(self._connections):
            if self._is_stopping():
                raise Stopping
            lost = self._lost_host()
            if lost is not None:
                raise MeshStartError(lost.fact, fix=lost.fix) from lost
            if time.monotonic() > deadline_s:
                missing = [one.name for one in self._connections if one.host not in found]
                raise MeshStartError(
                    f"The agents of {', '.join(missing)} {failure} after {self._request.start_timeout_s:g} s.",
                    fix=f"moreh-ap doctor --hosts {','.join(missing)}",
                )
            time.sleep(POLL_S / 5)

    def _answers(self) -> str:
        address = self._answers_at
        return f"tls://[{address}]:0" if ":" in address else f"tls://{address}:0"

    def _command(self, rank: int) -> Sequence[str]:
        return ["-S", warm_client.__file__, *self._served[self._host(rank).host].warm]

    def _listen(self) -> None:
        """Does nothing: workers connect to the agent of their host."""

    def _workers_run(self) -> None:
        """Keeps the pipes open: agents send what goes into them."""

    def _launch(self, rank: int) -> Launch:
        serving = self._served[self._host(rank).host]
        stdout, stderr = serving.streams[str(rank)]
        others = [fd for other, pair in serving.streams.items() if int(other) != rank for fd in pair]
        return Launch(rank, serving.pid_fd, stdout, stderr, tuple(others), self._imports())

    def _environment(self, rank: int) -> Mapping[str, str | None]:
        one, request = self._host(rank), self._request
        local = worker_environment.worker_environment(
            rank % self._per_host,
            self._per_host,
            device_type=request.device_type,
            visible_devices=",".join(one.report.gpus),
            threads_per_worker=request.threads_per_worker,
        )
        return worker_environment.on_other_host(local, rank, request.num_workers, one.files, one.interface)

    def _spec(self, rank: int) -> WorkerSpec:
        serving = self._served[self._host(rank).host]
        return replace(
            super()._spec(rank),
            shared_memory_fd=serving.memory_fd,
            store_path=serving.store,
            store_class=_STORE,
            commands_path=serving.commands,
            index=rank % self._per_host,
            is_relayed=True,
            copies=tuple(MemoryFile(*one) for one in serving.copies),
        )

    def _has_no_commands(self, host: int, why: str) -> None:
        """Counts a host as lost whose connection for commands has ended, if nothing else says why before."""
        one = self._connections[host]  # later others may be in its place
        if not self._ended.wait(_WHY_S):
            one.give_up(why or "its connection for commands has ended")

    def _read_pids(self) -> None:
        """Does nothing: agents tell them."""

    def _handler(self, one: HostConnection) -> Callable[[Message], None]:
        def handle(message: Message) -> None:
            kind, values = message.kind, message.values
            if one not in self._connections:  # it was lost before
                return
            if kind == "output":
                self._output.feed(values["rank"], values["name"], message.payload)
            elif kind == "store":
                self._store.ask_from(one, dict(values), message.payload)
            elif kind == "serving" and values.pop("start") == self._start_number:
                self._served[one.host] = Serving(**values)
            elif kind == "warm":
                self._warm.add(one.host)
            elif kind == "pid":
                self._children[values["rank"]] = RemoteChild(values["pid"])
            elif kind == "exit":
                child = self._children.get(values["rank"])  # none: of workers of another launcher
                if isinstance(child, RemoteChild):
                    child.ended(values["code"])

        return handle
