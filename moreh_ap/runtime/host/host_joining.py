"""How hosts join: connected, looked at, compared, and given what they need before anything heavy is started.

Decides the order, and how long it may take. Must not know the engine, nor torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from moreh_ap.errors import OptionError
from moreh_ap.hosts import host_files, host_table, joining_checks, reachability, script_files
from moreh_ap.hosts.certificates import Authority
from moreh_ap.hosts.clusters import kubernetes
from moreh_ap.hosts.credentials import Credentials
from moreh_ap.hosts.host_list import BY_KUBERNETES, LINK, LOCAL_NAMES, public_name
from moreh_ap.hosts.host_report import look
from moreh_ap.hosts.joining_checks import Row, Wanted
from moreh_ap.hosts.ways import reach
from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError

JOIN_S = 10.0
"""How long hosts have to answer and to be compared."""


@dataclass
class Hosts:
    """Hosts that can join.

    Attributes:
        connections: The hosts, in the order in which they were given.
        rows: What was looked at.
        controller_address: Where the hosts reach the controller.
        script_folder: The folder of the script.
        sent: Bytes of each file that hosts were sent: (host, path).
        ports: Where each host listens for others that try to reach it.
    """

    connections: list[HostConnection]
    rows: list[Row]
    controller_address: str = ""
    script_folder: str = ""
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def device_type(self) -> str:
        """The kind of devices that all have."""
        return "cuda" if all(connection.report.gpus for connection in self.connections) else "cpu"

    @property
    def devices_per_host(self) -> int:
        """As many as each has."""
        reports = [connection.report for connection in self.connections]
        return min(len(one.gpus) if self.device_type == "cuda" else one.num_cores for one in reports)

    def end(self) -> None:
        """Ends the agents."""
        on_all(self.connections, lambda connection: connection.end())


def connect(
    hosts: Sequence[str],
    per_host: int | None = None,
    address: str = "127.0.0.1",
    beside: Sequence[HostConnection] = (),
) -> Hosts:
    """Connects to hosts and looks at them, all at the same time.

    Args:
        hosts: What `parse_hosts` returned.
        per_host: Devices wanted of each; None: as many as it has.
        address: This machine's, where all hosts are this machine.
        beside: Hosts that are used already, which have to reach these, and these them.

    Returns:
        The hosts that have answered, and what was seen of all; `Hosts.rows` says what is not as it has to be.

    Raises:
        MeshStartError: The pods of a Kubernetes job do not start.
    """
    pods = [host.removeprefix(BY_KUBERNETES) for host in hosts if host.startswith(BY_KUBERNETES)]
    kubernetes.await_agents(pods, os.environ)
    deadline_s = time.monotonic() + JOIN_S
    found = Hosts([], [], script_folder=script_files.script_folder())
    begun: list[HostConnection] = []
    given_up = threading.Event()

    def begin(host: str) -> HostConnection | Row:
        connection = None
        try:
            connection = HostConnection(host, reach(host))
            begun.append(connection)
            if given_up.is_set():  # meanwhile
                connection.end()
            connection.await_report(max(1.0, deadline_s - time.monotonic()))
        except (OSError, HostLostError) as error:
            if connection is not None:
                connection.end()
            reason = str(error) or type(error).__name__
            loopback = reachability.loopback_address(host) if "connect to host" in reason else ""  # ssh has a name
            return joining_checks.unreachable(host, reason, loopback)
        return connection

    try:
        for answer in on_all(hosts, begin):
            if isinstance(answer, Row):
                found.rows.append(answer)
            else:
                found.connections.append(answer)
        _look_at_all(found, per_host, address, beside)
    except BaseException:  # Ctrl-C among them: in a notebook, agents would wait for a word for as long as it is open
        given_up.set()
        on_all(begun, lambda connection: connection.end())
        raise
    return found


def _look_at_all(found: Hosts, per_host: int | None, address: str, beside: Sequence[HostConnection]) -> None:
    """Adds what is to be said of each host, and gives it what it needs."""
    here, own = look(os.environ), found.connections
    together = [*beside, *own]
    kind = "cuda" if own and any(one.report.gpus for one in together) else "cpu"
    wanted = Wanted(here, kind, per_host)
    for one in own:
        found.rows += joining_checks.check_report(one.host, one.report, wanted, one.arrived_s, one.delay_s)
    found.rows += joining_checks.check_machines([(one.host, one.report) for one in together], kind)
    try:
        found.connections = together
        _look_at_network(found, address)
        found.connections = own
        _send_script(found)
    except HostLostError as error:
        found.connections = own
        found.rows.append(joining_checks.lost(error.host, str(error)))


def measure_links(found: Hosts) -> list[Row]:
    """Returns a row for the link from here to each host, and one for that from each to the next, measured in turn."""
    rows, hosts = [], found.connections
    for one in hosts:
        try:
            seen = _speed(reachability.measure(one.address, found.ports[one.host]))
        except (OSError, KeyError) as error:
            seen = str(error)
        rows.append(Row(one.name, "link from here", seen))
    for one, other in zip(hosts, [*hosts[1:], *hosts[:1]] if len(hosts) > 1 else []):
        values = one.ask("measure", JOIN_S, address=other.address, port=found.ports.get(other.host, 0)).values
        seen = values.pop("error") or _speed(reachability.Speed(**values))
        rows.append(Row(one.name, "link to the next host", f"{seen} ({other.name})"))
    return rows


def slowest_link(found: Hosts, beside: Sequence[HostConnection]) -> reachability.Speed:
    """Returns the link of a host that joins others: the slower direction, to the slower one of its two neighbours.

    In a ring these are the last and the first one. Measured one after the other, in some seconds at most.

    Args:
        found: The host, which can join.
        beside: The others, in order.

    Raises:
        OSError: A host does not answer the other.
        HostLostError: One of them is lost.
    """
    (new,), speeds = found.connections, []
    for other in {one.host: one for one in (beside[-1], beside[0])}.values():
        for source, target in ((new, other), (other, new)):
            values = source.ask("measure", JOIN_S, address=target.address, port=found.ports[target.host]).values
            error = values.pop("error")
            if error:
                raise OSError(f"{source.name} cannot reach {target.name}: {error}")
            speeds.append(reachability.Speed(**values))
    return reachability.slowest(speeds)


def _speed(speed: reachability.Speed) -> str:
    return f"{speed.bytes_per_s / 1e6:,.0f} MB/s, {speed.round_trip_s * 1e3:.2g} ms there and back"


def join(hosts: Sequence[str], per_host: int | None = None, address: str = "127.0.0.1") -> Hosts:
    """Connects to hosts that can all join; see `connect` for the arguments.

    Raises:
        MeshStartError: One cannot; a table of all is on standard error.
    """
    found = connect(hosts, per_host, address)
    error = joining_checks.error(found.rows)
    if error is not None:
        found.end()
        host_table.show(found.rows, Console(stderr=True, width=None if sys.stderr.isatty() else 160))
        raise error
    return found


class RunCredentials:
    """What the processes of a run show each other; made once, since the authority's key is gone afterwards, unless
    hosts may join later."""

    def __init__(self) -> None:
        self._made: dict[str, Credentials] = {}
        self._files: dict[str, str] = {}
        self._authority: Authority | None = None

    def of_hosts(self, hosts: Hosts, *, others_may_join: bool = False) -> dict[str, Credentials]:
        """Returns the credentials of each address.

        Args:
            hosts: The hosts.
            others_may_join: Whether there may be addresses that the first call does not have.

        Raises:
            OptionError: The hosts are others than those of this process's first call.
        """
        addresses = [hosts.controller_address, *(one.address for one in hosts.connections)]
        if not self._made:
            if "monarch" in sys.modules:
                raise OptionError(
                    "The engine runs already, for the devices of this machine alone.",
                    "hosts in the first call of a process",
                    'torch.moreh.option.enable_advanced_parallelization(hosts=["node1", "node2"])  # the only call',
                    LINK,
                )
            authority = Authority()
            self._made = {address: authority.credentials(address) for address in dict.fromkeys(addresses)}
            self._authority = authority if others_may_join else None
            self._files = self._made[hosts.controller_address].as_files()
        for address in addresses:
            if address in self._made:
                continue
            if self._authority is None:
                fact, allowed = "The hosts have other addresses than before.", "the hosts of the first call"
                raise OptionError(fact, allowed, "", LINK)
            self._made[address] = self._authority.credentials(address)
        return self._made

    @property
    def variables(self) -> dict[str, str]:
        """The engine's variables in this process."""
        return self._files


run_credentials = RunCredentials()
"""Those of this process: the engine reads them once."""


def _look_at_network(found: Hosts, address: str) -> None:
    """Finds out where all reach each other, and tries it."""
    others = [one for one in found.connections if one.host not in LOCAL_NAMES]
    routes = [own for one in others if one.address and (own := _own_address(one.address))]
    # Hosts that are this machine are told the address by which the others reach it.
    found.controller_address = routes[0] if routes else address
    for one in found.connections:
        one.address = one.address or found.controller_address
    found.rows += joining_checks.check_addresses([(one.host, one.address) for one in found.connections])
    probe = reachability.Probe(found.controller_address)
    ports = found.ports
    try:
        listening = on_all(found.connections, lambda one: one.ask("listen", JOIN_S, address=one.address).values)
        for one, values in zip(found.connections, listening):
            one.interface, one.files, ports[one.host] = values["interface"], values["files"], values["port"]
            seen = values["error"] or f"{one.interface} {one.address}"
            fix = f"ssh {one.host} ip -brief address" if one.host == one.name else "ip -brief address"
            found.rows.append(Row(one.name, "interface", seen, "an address of its own", not values["error"], fix))
        unreached = on_all(found.connections, lambda one: reachability.reaches(one.address, ports[one.host]))
        for one, error in zip(found.connections, unreached):
            ends = found.controller_address, one.address
            found.rows.append(joining_checks.reached(one.name, "reached from here", error, one.host, *ends))
        targets = [(joining_checks.CONTROLLER, found.controller_address, probe.port)]
        targets += [(one.host, one.address, ports[one.host]) for one in found.connections]

        def try_others(one: HostConnection) -> list[Row]:
            wanted = [target for target in targets if target[0] != one.host]
            failed = one.ask("reach", JOIN_S, targets=[target[1:] for target in wanted]).values["failed"]
            return [
                joining_checks.reached(one.name, f"reaches {public_name(name)}", error, name, one.address, address)
                for (name, address, _), error in zip(wanted, failed)
            ]

        for rows in on_all(found.connections, try_others):
            found.rows += rows
    finally:
        probe.close()


def _own_address(address: str) -> str:
    with contextlib.suppress(OSError):
        numeric = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)[0][4][0]
        return reachability.own_address_towards(str(numeric))
    return ""


def _send_script(found: Hosts) -> None:
    """Sends hosts that do not share the script's folder the modules of it that they do not have."""
    folder = found.script_folder
    identity = list(script_files.identity_of(folder))
    paths = [folder]
    same = on_all(found.connections, lambda one: one.ask("identities", JOIN_S, paths=paths).values["identities"][0])
    others = [one for one, seen in zip(found.connections, same) if seen != identity]
    looked = script_files.look_at(folder) if others else None

    def send(one: HostConnection) -> Row:
        if looked is None or one not in others:
            return Row(one.name, "script's folder", "shared")
        if not looked.is_whole:
            seen = f"more than {script_files.MOST_FILES} files or {script_files.MOST_BYTES >> 20} MiB of Python files"
            return Row(one.name, "script's folder", seen, "a folder of its own", False, f"mkdir {folder}/training")
        answer = one.ask("differing", JOIN_S, folder=folder, digests=dict(looked.digests)).values["files"]
        names = script_files.to_send(looked.digests, answer)
        for name in names:
            path = os.path.join(folder, name)
            try:
                found.sent[one.name, path] = one.send_file(path, host_files.SCRIPT, name)
            except OSError as error:
                return joining_checks.not_taken(one.host, str(error).removeprefix(f"{one.name}: "))
        return Row(one.name, "script's folder", f"{len(names)} files sent" if names else "the same files")

    found.rows += on_all(found.connections, send)


def on_all(things: Sequence, work: Callable) -> list:  # type: ignore[type-arg]
    """Returns what a function returns for each of the things, called for all at the same time.

    A Ctrl-C does not wait for them, nor does the end of the script: a host that does not answer takes its time.

    Raises:
        Exception: What the function has raised, for the first of the things if for several.
    """
    done: list[Any] = [None] * len(things)
    errors: list[BaseException | None] = [None] * len(things)

    def run(index: int) -> None:
        try:
            done[index] = work(things[index])
        except BaseException as error:  # for the thread that waits
            errors[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), name="moreh-join", daemon=True) for index in range(len(done))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return done
