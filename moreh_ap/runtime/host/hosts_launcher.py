"""The processes of a worker group on several hosts, from their start to their end.

Decides what differs from one machine: agents are told what to do over their connections, which also carry what workers
print, how they end, and the store through which they meet. Must not know commands, nor how hosts are compared.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moreh_ap.errors import MeshStartError, WorkerLostError
from moreh_ap.hosts import host_files, joining_checks, script_files
from moreh_ap.hosts.channel import Message
from moreh_ap.hosts.credentials import ENGINE_VARIABLES, context_of
from moreh_ap.hosts.host_environment import passed_on
from moreh_ap.hosts.host_list import LOCAL_NAMES
from moreh_ap.local.jobs import RemoteWorker
from moreh_ap.runtime import worker_environment
from moreh_ap.runtime.bootstrap import Launch
from moreh_ap.runtime.child_process import RemoteChild
from moreh_ap.runtime.engine_error import EngineError
from moreh_ap.runtime.forking import warm_client
from moreh_ap.runtime.forking.early_imports import EarlyImports
from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError
from moreh_ap.runtime.host.host_joining import Hosts, RunCredentials, join, on_all
from moreh_ap.runtime.host.serving import Serving
from moreh_ap.runtime.host.store_server import StoreServer
from moreh_ap.runtime.host.usage_of_hosts import UsageOfHosts
from moreh_ap.runtime.launcher import POLL_S, Launcher, LaunchRequest, Stopping
from moreh_ap.runtime.relay.carrier import Carrier
from moreh_ap.runtime.relay.command_links import CommandLinks
from moreh_ap.runtime.shared_memory import SharedMemory
from moreh_ap.runtime.worker.actor import WorkerSpec

_ASK_S = 60.0
_WHY_S = 2.0  # ssh may have last words of why a host has gone
_DIGEST_S = 3600.0  # of files of hundreds of gigabytes
_STOP_S = 0.5  # the engine's own end never comes where an agent has ended

_STORE = "moreh_ap.runtime.host.host_store:HostStore"

_credentials = RunCredentials()  # of this process: the engine reads them once


class HostPool:
    """The hosts of an accelerator, for one worker group after the other.

    Args:
        hosts: What `parse_hosts` returned.
        devices: Devices wanted of all together; None: as many as each has.
        say: Prints a line of the log.
        address: This machine's, where all hosts are this machine.

    Attributes:
        on_usage: Told every few seconds what all workers use.

    Raises:
        MeshStartError: A host cannot join.
    """

    def __init__(
        self, hosts: Sequence[str], devices: int | None, say: Callable[[str], object], address: str = "127.0.0.1"
    ) -> None:
        self.hosts, self._say, self._address = hosts, say, address
        self._per_host = None if devices is None else devices // len(hosts)
        self._joined: Hosts | None = join(hosts, self._per_host, address)
        self._own_address = self._joined.controller_address
        _credentials.of_hosts(self._joined)  # before the engine is imported
        self.device_type = self._joined.device_type
        self.per_host = self._per_host or self._joined.devices_per_host
        sharing = Counter(one.report.machine for one in self._joined.connections)  # containers of one machine
        self.num_cores = min(one.report.num_cores // sharing[one.report.machine] for one in self._joined.connections)
        self.names = [one.name for one in self._joined.connections]
        self._provided: dict[str, None] = {}
        self.on_usage: Callable[[Sequence[RemoteWorker]], object] = lambda workers: None
        for (host, path), num_bytes in self._joined.sent.items():
            self._say(f"sent to {host}: {path} ({num_bytes} bytes)")
        for one in self._joined.connections:
            if len(one.report.gpus) > self.per_host and devices is None:
                self._say(
                    f"{one.name}: {self.per_host} of {len(one.report.gpus)} GPUs are used, as many as each host has"
                )

    def launcher(self, request: LaunchRequest, is_stopping: Callable[[], bool]) -> Launcher:
        """Returns the launcher of a worker group."""
        return HostsLauncher(request, is_stopping, self)

    def take(self) -> Hosts:
        """Returns hosts with agents that wait; those of the last worker group have ended with it.

        Raises:
            MeshStartError: A host can no longer join.
        """
        joined, self._joined = self._joined, None
        return joined or join(self.hosts, self._per_host, self._address)

    def beside(self) -> HostPool:
        """Returns this machine as the host of one more worker, beside those of the other hosts.

        Raises:
            MeshStartError: It cannot be one.
        """
        return HostPool((LOCAL_NAMES[0],), 1, self._say, self._own_address)

    def place_of(self, rank: int, num_workers: int) -> str:
        """Returns host and number of one of so many workers, as the log says it. Every host has equally many."""
        per_host = num_workers // len(self.names)
        return f"{self.names[rank // per_host]}:{rank % per_host}"

    def provide(self, connection: HostConnection, files: Sequence[str]) -> None:
        """Sends a host the files that it does not have: it sees the same file system, or has the same content.

        Raises:
            HostLostError: The host is lost.
            OSError: A file cannot be read here, or not be written there.
        """
        self._provided.update(dict.fromkeys(files))
        there = connection.ask("identities", _ASK_S, paths=list(files)).values["identities"]
        for path, seen in zip(files, map(tuple, there)):
            here = script_files.identity_of(path)
            if not here or seen == here or (seen[1:2] == here[1:2] and self._has_content(connection, path)):
                continue
            num_bytes = connection.send_file(path, host_files.DATA, host_files.sent_name(path))
            self._say(f"sent to {connection.name}: {path} ({num_bytes} bytes)")

    def provided(self) -> list[str]:
        """Returns the files that earlier workers found, as far as they are still there."""
        return [path for path in self._provided if os.path.exists(path)]

    def _has_content(self, connection: HostConnection, path: str) -> bool:
        return bool(connection.ask("digest", _DIGEST_S, path=path).values["digest"] == host_files.digest(path))


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
        self._answers_at = ""
        self._per_host = request.num_workers // len(pool.hosts)
        self._served: dict[str, Serving] = {}
        self._store_server = StoreServer()
        self._usage = UsageOfHosts(self._per_host, request.threads_per_worker, request.device_type)
        self._host_links: CommandLinks | None = None
        self._early = EarlyImports(request.imports, self._tell_warm_parents)
        self._warm: set[str] = set()  # hosts that can fork workers
        self._ended = threading.Event()
        super().__init__(request, is_stopping)

    def find_dead(self) -> WorkerLostError | None:
        for index, one in enumerate(self._connections):
            reason = one.lost()
            if reason is not None and not self._ended.is_set():
                first = index * self._per_host
                ranks = ", ".join(str(first + rank) for rank in range(self._per_host))
                return WorkerLostError(
                    f"The host {one.name} is lost, and the workers on it ({ranks}): {reason}",
                    fix=f"moreh-ap doctor --hosts {one.name}",
                )
        return super().find_dead()

    def kill(self) -> None:
        self._ended.set()
        self._early.stop()
        if self._host_links is not None:
            self._host_links.close()
        for one in self._connections:
            with contextlib.suppress(HostLostError):
                one.send("end")

    def end(self) -> None:
        self.kill()
        for one in self._connections:
            one.end()  # what its workers printed last has arrived then
        super().end()

    def provide(self, files: Sequence[str]) -> None:
        def to(one: HostConnection) -> None:
            try:
                self._pool.provide(one, files)
            except (HostLostError, OSError) as error:
                fix = joining_checks.on_host(one.host, "df -h ${TMPDIR:-/tmp}")
                fact = f"The host {one.name} cannot be sent the model's files: {error}"
                raise WorkerLostError(fact, fix=fix) from error

        on_all(self._connections, to)

    def take(self, written: Mapping[int, tuple[str, str]]) -> dict[int, str]:
        def from_host(one: HostConnection) -> list[tuple[int, str]]:
            digests = []
            for rank, (there, here) in written.items():
                if self._host(rank) is not one:
                    continue
                name = os.path.basename(there)
                try:
                    if here:
                        digests.append((rank, one.take_file(name, here)))
                    else:
                        one.remove_file(name)
                except HostLostError as error:
                    raise WorkerLostError(f"The host {one.name} is lost, and what it has saved: {error}") from error
            return digests

        return dict(found for digests in on_all(self._connections, from_host) for found in digests)

    def carrier(self, memory: SharedMemory) -> Carrier:
        assert self.engine is not None, "workers have joined"
        places = [(one.address, self._served[one.host].commands_port) for one in self._connections]
        shown = context_of(_credentials.variables, is_server=False)
        try:
            self._host_links = links = CommandLinks(places, self._per_host, shown, self._has_no_commands)
        except EngineError as error:
            raise MeshStartError(str(error), fix=f"moreh-ap doctor --hosts {','.join(self._pool.names)}") from error
        memory.carry_by(links.keep, self._per_host)
        self.engine.serve()
        return links

    # -- what differs from one machine -----------------------------------------------------------------------------

    def _stop_timeout_s(self) -> float:
        return _STOP_S

    def _variables(self) -> Mapping[str, str]:
        return _credentials.variables

    def _host(self, rank: int) -> HostConnection:
        return self._connections[rank // self._per_host]

    def _label(self, rank: int) -> str:
        return f"{self._pool.names[rank // self._per_host]}, worker {rank}"

    def describe(self, rank: int) -> str:
        return f"{super().describe(rank)} on {self._host(rank).name}"

    def _supervisor(self) -> str:
        return "A host's agent"

    def _start_agents(self) -> None:
        again, hosts = self._pool.provided(), self._pool.take()
        self._connections, self._answers_at = hosts.connections, hosts.controller_address
        made = _credentials.of_hosts(hosts)
        for index, one in enumerate(self._connections):
            one.on_message = self._handler(one)
            if index == 0:  # all hosts speak equally often: once for all
                one.on_usage = lambda: self._pool.on_usage(self._usage.of_all(self._connections))
            ranks = [index * self._per_host + rank for rank in range(self._per_host)]
            credentials = asdict(made[one.address])
            with contextlib.suppress(HostLostError):  # `_agents` says so
                one.send(
                    "serve",
                    ranks=ranks,
                    credentials=credentials,
                    working_folder=os.getcwd(),
                    imports=self._early.now,
                    environment=worker_environment.of_all([self._environment(rank) for rank in ranks]),
                )
                if again:
                    self._pool.provide(one, again)
        self._early.begin()

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
            lost = self.find_dead()
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
        return ["-S", warm_client.__file__, self._served[self._host(rank).host].warm]

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
        path = os.pathsep.join((str(Path(one.files, host_files.SCRIPT)), local["PYTHONPATH"]))
        return {
            **local,
            worker_environment.WORKER_VARIABLE: str(rank),
            "RANK": str(rank),
            "WORLD_SIZE": str(request.num_workers),
            "PYTHONPATH": path,
            host_files.FOLDER_VARIABLE: one.files,
            "GLOO_SOCKET_IFNAME": one.interface,
            "NCCL_SOCKET_IFNAME": one.interface,
            **passed_on(os.environ),
            "TMPDIR": None,  # the agent's is for sockets, and this process's may not be there
            **dict.fromkeys(ENGINE_VARIABLES),
        }

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
        )

    def _has_no_commands(self, host: int, why: str) -> None:
        """Counts a host as lost whose connection for commands has ended, if nothing else says why before."""
        if not self._ended.wait(_WHY_S):
            self._connections[host].give_up(why or "its connection for commands has ended")

    def _read_pids(self) -> None:
        """Does nothing: agents tell them."""

    def _handler(self, one: HostConnection) -> Callable[[Message], None]:
        def handle(message: Message) -> None:
            kind, values = message.kind, message.values
            if kind == "output":
                self._output.feed(values["rank"], values["name"], message.payload)
            elif kind == "store":
                self._ask_store(one, dict(values), message.payload)
            elif kind == "serving":
                self._served[one.host] = Serving(**values)
            elif kind == "warm":
                self._warm.add(one.host)
            elif kind == "pid":
                self._children[values["rank"]] = RemoteChild(values["pid"])
            elif kind == "exit":
                child = self._children[values["rank"]]
                assert isinstance(child, RemoteChild), "all are"
                child.ended(values["code"])

        return handle

    def _ask_store(self, one: HostConnection, values: dict[str, Any], payload: bytes) -> None:
        request = values.pop("request")

        def answer(payload: bytes, **found: Any) -> None:
            with contextlib.suppress(HostLostError):  # `find_dead` says so
                one.send("store", payload, request=request, **found)

        self._store_server.ask(values, payload, answer)
