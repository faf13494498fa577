"""The hosts of an accelerator, for one worker group after the other.

Decides which hosts there are, how many workers each has, and which files they are sent. Must not know what workers do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from moreh_ap.errors import WorkerLostError
from moreh_ap.hosts import host_files, joining_checks, script_files
from moreh_ap.hosts.host_list import LOCAL_NAMES, is_name_of_machine
from moreh_ap.local.jobs import RemoteWorker
from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError
from moreh_ap.runtime.host.host_joining import Hosts, connect, join, on_all, run_credentials
from moreh_ap.runtime.host.hosts_launcher import HostsLauncher
from moreh_ap.runtime.launcher import Launcher, LaunchRequest

_ASK_S = 60.0
_DIGEST_S = 3600.0  # of files of hundreds of gigabytes


class HostPool:
    """Those hosts.

    Args:
        hosts: What `parse_hosts` returned.
        devices: Devices wanted of all together; None: as many as each has.
        say: Prints a line of the log.
        address: This machine's, where all hosts are this machine.
        others_may_join: Whether hosts are used that join later: those of the file, and those that were lost.
        file: The file that names the hosts; empty: they were named in another way.

    Attributes:
        hosts: Those that are used.
        on_usage: Told every few seconds what all workers use.
        kept_by: Hosts that have copies of what workers held that have ended. See [Note: who keeps copies].
        refused: Hosts that are not tried again.
        next_start: Returns a number for a start of workers.

    Raises:
        MeshStartError: A host cannot join.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        devices: int | None,
        say: Callable[[str], object],
        address: str = "127.0.0.1",
        *,
        others_may_join: bool = False,
        file: str = "",
    ) -> None:
        self.hosts, self.say, self._address = list(hosts), say, address
        self.given, self.others_may_join, self.file = list(hosts), others_may_join, file
        self.kept_by: list[HostConnection] = []
        self.refused: set[str] = set()
        self.next_start = itertools.count(1).__next__
        self._devices = devices
        self._per_host = None if devices is None else devices // len(hosts)
        self._joined: Hosts | None = join(hosts, self._per_host, address)
        self._own_address = self._joined.controller_address
        run_credentials.of_hosts(self._joined, others_may_join=others_may_join)  # before the engine is imported
        self.device_type = self._joined.device_type
        self.per_host = self._per_host or self._joined.devices_per_host
        sharing = Counter(one.report.machine for one in self._joined.connections)  # containers of one machine
        self.num_cores = min(one.report.num_cores // sharing[one.report.machine] for one in self._joined.connections)
        self.names = [one.name for one in self._joined.connections]
        self._say_which_are_one(self._joined.connections)
        self._provided: dict[str, None] = {}
        self.on_usage: Callable[[Sequence[RemoteWorker]], object] = lambda workers: None
        for (host, path), num_bytes in self._joined.sent.items():
            self.say(f"sent to {host}: {path} ({num_bytes} bytes)")
        for one in self._joined.connections:
            if len(one.report.gpus) > self.per_host and devices is None:
                self.say(
                    f"{one.name}: {self.per_host} of {len(one.report.gpus)} GPUs are used, as many as each host has"
                )

    def _say_which_are_one(self, connections: Sequence[HostConnection]) -> None:
        """Says which names, of those that a user gave for machines, are names of one: containers there have others."""
        names: dict[str, list[str]] = {}
        for one in connections:
            if is_name_of_machine(one.host):
                names.setdefault(one.report.machine, []).append(one.name)
        for same in names.values():
            if len(same) > 1:
                self.say(f"{' and '.join(same)} are one machine, whose cores and memory their workers share")

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

    def use(self, connections: Sequence[HostConnection]) -> None:
        """Has these hosts be used from now on, and no others."""
        self.hosts, self.names = [one.host for one in connections], [one.name for one in connections]
        if self._devices is not None:
            self._per_host = self._devices // len(self.hosts)

    def give_back(self, connections: list[HostConnection], kept_by: list[HostConnection]) -> None:
        """Has the next worker group use these hosts, whose agents go on, and know who keeps copies."""
        self.use(connections)
        self._joined, self.kept_by = Hosts(connections, [], self._own_address), kept_by

    def end_given_back(self) -> None:
        """Ends the agents of hosts that no worker group has taken."""
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.end()

    def refuse(self, kept: Sequence[str]) -> None:
        """Has the next worker group use no other hosts than these; the others are not tried again."""
        assert self._joined is not None, "given back"
        others = [one for one in self._joined.connections if one.host not in kept]
        self.refused |= {one.host for one in others}
        for one in others:
            one.end()
        self._joined.connections = [one for one in self._joined.connections if one.host in kept]
        self.use(self._joined.connections)

    def num_workers_on(self, num_hosts: int, num_workers: int) -> int:
        """Returns how many workers there can be on so many hosts: at least so many as there are.

        Args:
            num_hosts: How many hosts.
            num_workers: How many workers there are.
        """
        per_host = self.per_host if self._devices is None else self._devices // num_hosts
        return max(num_workers, per_host * num_hosts)

    def connect(self, host: str, beside: Sequence[HostConnection]) -> Hosts:
        """Connects to a host that was not used, beside those that are, and compares it."""
        return connect([host], self.per_host, self._own_address, beside)

    def beside(self) -> HostPool:
        """Returns this machine as the host of one more worker, beside those of the other hosts.

        Raises:
            MeshStartError: It cannot be one.
        """
        return HostPool((LOCAL_NAMES[0],), 1, self.say, self._own_address)

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
        if not files:
            return
        there = connection.ask("identities", _ASK_S, paths=list(files)).values["identities"]
        for path, seen in zip(files, map(tuple, there)):
            here = script_files.identity_of(path)
            if not here or here in (seen, connection.given.get(path)):
                continue
            if seen[1:2] == here[1:2] and self._has_content(connection, path):
                continue
            num_bytes = connection.send_file(path, host_files.DATA, host_files.sent_name(path))
            connection.given[path] = here
            self.say(f"sent to {connection.name}: {path} ({num_bytes} bytes)")

    def provide_all(self, connections: Sequence[HostConnection], files: Sequence[str]) -> None:
        """Sends each host the files that it does not have. One that is lost gets none: who waits for it says so.

        Raises:
            WorkerLostError: A file cannot be read here, or not be written there.
        """

        def to(one: HostConnection) -> None:
            try:
                with contextlib.suppress(HostLostError):
                    self.provide(one, files)
            except OSError as error:
                fix = joining_checks.on_host(one.host, "df -h ${TMPDIR:-/tmp}")
                fact = f"The host {one.name} cannot be sent the model's files: {error}"
                raise WorkerLostError(fact, fix=fix) from error

        on_all(connections, to)

    @staticmethod
    def take_from_all(connections: Sequence[HostConnection], written: Mapping[int, tuple[str, str]]) -> dict[int, str]:
        """Moves what workers have written to this machine; see `Launcher.take`.

        Raises:
            WorkerLostError: A host is lost, perhaps before, so that it is not among the connections any more.
        """

        def from_host(one: HostConnection) -> list[tuple[int, str]]:
            try:
                return one.take_files({rank: at for rank, at in written.items() if owners[rank] is one})
            except HostLostError as error:
                raise WorkerLostError(f"The host {one.name} is lost, and what it has saved: {error}.") from error

        owners = {rank: _owner_of(there, connections) for rank, (there, _) in written.items()}
        return dict(found for digests in on_all(connections, from_host) for found in digests)

    def will_provide(self, files: Sequence[str]) -> None:
        """Has workers that start from now on find files."""
        self._provided.update(dict.fromkeys(files))

    def provided(self) -> list[str]:
        """Returns the files that workers find, as far as they are still there."""
        return [path for path in self._provided if os.path.exists(path)]

    def _has_content(self, connection: HostConnection, path: str) -> bool:
        return bool(connection.ask("digest", _DIGEST_S, path=path).values["digest"] == host_files.digest(path))


def _owner_of(path: str, connections: Sequence[HostConnection]) -> HostConnection:
    """Returns the host on which workers have written a file.

    Raises:
        WorkerLostError: It is none of these.
    """
    owner = next((one for one in connections if path.startswith(f"{one.files}/")), None)
    if owner is None:
        raise WorkerLostError(f"A host is lost, and what it has saved ({os.path.basename(path)}).")
    return owner
