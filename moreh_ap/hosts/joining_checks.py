"""What a host has to be like to join.

Decides what is compared, from which difference on a host cannot join, and what a person can paste then. Must not know
how facts are gathered, nor how a table is drawn.
"""

from __future__ import annotations

import ipaddress
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moreh_ap.errors import MeshStartError
from moreh_ap.hosts.host_list import BY_HAND, BY_KUBERNETES, BY_SLURM, LINK, LOCAL_NAMES, public_name
from moreh_ap.hosts.host_report import COMPARED_PACKAGES, HostReport
from moreh_ap.version import __version__

MOST_CLOCK_DIFFERENCE_S = 10.0
"""A host whose clock is ahead of the controller's by more than the engine's orphan time-out, 60 s, ends its workers."""

CONTROLLER = "controller"
"""What the machine of the script is called as the target of a connection."""

SILENT = "its agent has said nothing"
"""The beginning of what is seen of a host that ssh reaches, and whose agent does not answer in time."""

ENDED = "the connection has ended"
"""What is seen of a host where nothing says more."""

_TURNED_AWAY = (
    "it has ended the connection: that is not the token of the line it has printed, or no agent can start there"
)
_SPACE, _SHOW_SPACE = "space in its folder for temporary files", "df -h ${TMPDIR:-/tmp}"
_INSTALL = f"{sys.executable} -m pip install 'moreh-ap=={__version__}'"

_HEARD_BEHIND_SSH = (
    ("No module named", "this package in the same environment", _INSTALL),
    (f"{sys.executable}", "the same Python at the same path", f"ls -l {sys.executable}"),
    ("No space left on device", _SPACE, _SHOW_SPACE),
    ("Read-only file system", _SPACE, _SHOW_SPACE),
)
"""Where ssh works, and the agent does not start: what is in the error, what there has to be, and what shows it."""

LEAST_MEMORY_BYTES = 512 << 20
"""For each worker: what Python and PyTorch take before a model is there."""

LEAST_SHARED_MEMORY_BYTES = 64 << 20
"""Docker's default. NCCL asks for up to 33 MB a pair of devices. Source: NCCL's documentation, "Troubleshooting"."""


@dataclass(frozen=True)
class Row:
    """One thing that was looked at on one host.

    Attributes:
        host: The host, as a log may name it.
        what: What was looked at.
        seen: What the host has.
        expected: What it has to have; empty if anything will do.
        ok: Whether that is so.
        fix: A line to paste where it is not.
    """

    host: str
    what: str
    seen: str
    expected: str = ""
    ok: bool = True
    fix: str = ""


@dataclass(frozen=True)
class Wanted:
    """What hosts are compared with.

    Attributes:
        here: The report of the controller's machine.
        device_type: "cuda" or "cpu"; empty: the type that all hosts have.
        per_host: Devices wanted of each host; None: as many as it has.
    """

    here: HostReport
    device_type: str = ""
    per_host: int | None = None


def unreachable(host: str, reason: str, loopback: str = "") -> Row:
    """Returns the row of a host that has not answered.

    Args:
        host: The host, as it was given.
        reason: What was heard instead.
        loopback: The loopback address for which its name stands on this machine; empty: it stands for none.
    """
    if loopback:
        seen = f"{loopback}, a loopback address: only this machine itself is reached there ({reason})"
        return _not_reached_by_others(public_name(host), seen)
    if host.startswith(BY_HAND):
        reason = _TURNED_AWAY if reason == ENDED else reason
        return Row(public_name(host), "answer", reason, "an agent that listens", False, "moreh-ap host  # on that host")
    if host.startswith(BY_SLURM):
        fix = f"srun --overlap --nodelist={public_name(host)} true"
        return Row(public_name(host), "answer", reason, "a step of the Slurm job", False, fix)
    if host.startswith(BY_KUBERNETES):
        fix = f"kubectl describe pods --selector job-name={public_name(host).rpartition('-')[0]}"
        return Row(public_name(host), "answer", reason, "a pod of the job, with its agent", False, fix)
    if reason.startswith(SILENT):
        return Row(host, "answer", reason, "an answer in time", False, f"ssh {host} uptime  # then start again")
    for heard, expected, command in _HEARD_BEHIND_SSH:
        if heard in reason:
            return Row(host, "answer", reason, expected, False, on_host(host, command))
    return Row(host, "answer", reason, "ssh without a password", False, f"ssh {host} true")


def lost(host: str, reason: str) -> Row:
    """Returns the row of a host that has answered, and then was lost while it was looked at."""
    expected = "an agent that goes on answering"
    return Row(public_name(host), "connection", reason, expected, False, on_host(host, "uptime"))


def check_report(host: str, report: HostReport, wanted: Wanted, arrived_s: float, delay_s: float) -> Iterator[Row]:
    """Yields a row for each fact of a host's report.

    Args:
        host: The host, as it was given.
        report: Its report.
        wanted: What it is compared with.
        arrived_s: When the report arrived, by this machine's clock.
        delay_s: How long before it was made at most.
    """
    name, here = public_name(host), wanted.here
    same_minor = report.python.split(".")[:2] == here.python.split(".")[:2]
    expected = ".".join(here.python.split(".")[:2])
    yield Row(name, "Python", report.python, expected, same_minor, on_host(host, f"python{expected} --version"))
    for package in ("moreh_ap", *COMPARED_PACKAGES):
        seen, right = _public(report.packages.get(package, "")), _public(here.packages.get(package, ""))
        pin = f"{package.replace('_', '-')}=={right}"
        fix = on_host(host, f"{report.executable or 'python'} -m pip install '{pin}'")
        yield Row(name, package, seen or "missing", right, seen == right, fix)
    ahead_s = report.time_s - arrived_s
    off_s = ahead_s if ahead_s > 0.0 else min(0.0, ahead_s + delay_s)
    clock_ok = abs(off_s) <= MOST_CLOCK_DIFFERENCE_S
    expected = f"within {MOST_CLOCK_DIFFERENCE_S:g} s"
    yield Row(name, "clock", f"{off_s:+.1f} s", expected, clock_ok, on_host(host, "sudo chronyc makestep"))
    yield _devices(host, report, wanted)
    per_host = wanted.per_host or len(report.gpus) or report.num_cores
    needed = per_host * LEAST_MEMORY_BYTES
    yield Row(
        name,
        "free memory",
        _size(report.free_memory_bytes),
        f"{_size(needed)} for {per_host} worker{'s' if per_host > 1 else ''}",
        report.free_memory_bytes >= needed,
        on_host(host, "free -h"),
    )
    yield Row(
        name,
        "free /dev/shm",
        _size(report.free_shared_memory_bytes),
        _size(LEAST_SHARED_MEMORY_BYTES),
        report.free_shared_memory_bytes >= LEAST_SHARED_MEMORY_BYTES,
        on_host(host, "sudo mount -o remount,size=1g /dev/shm  # in a container: docker run --shm-size=1g"),
    )


def check_machines(reports: Sequence[tuple[str, HostReport]], device_type: str) -> Iterator[Row]:
    """Yields a row for each host that is the same machine as an earlier one, whose GPUs would be used twice."""
    first: dict[str, str] = {}
    for host, report in reports:
        other = first.setdefault(report.machine, host)
        if other != host and device_type == "cuda":
            seen = f"the same machine as {public_name(other)}"
            yield Row(public_name(host), "machine", seen, "another machine", False, f"hosts=[{public_name(other)!r}]")


def check_addresses(addresses: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Yields a row for each host that only its own machine reaches, where there are other machines."""
    own = {host: ipaddress.ip_address(address.partition("%")[0]).is_loopback for host, address in addresses}
    if all(own.values()):
        return
    for host, address in addresses:
        if own[host]:
            yield _not_reached_by_others(
                public_name(host), f"{address}, a loopback address: only the host itself reaches it"
            )


def reached(host: str, what: str, error: str, target: str, source: str, address: str) -> Row:
    """Returns the row of a connection that was tried; the line to paste opens the firewall of where it was refused.

    Args:
        host: The host of the row, as a log may name it.
        what: Which connection.
        error: Why it could not be made; empty: it could.
        target: The host at its other end, as it was given, or `CONTROLLER`.
        source, address: The addresses of its ends.
    """
    allow = f"sudo ufw allow from {source} to {address} proto tcp"
    fix = f"{allow}  # on this machine" if target == CONTROLLER else on_host(target, allow)
    return Row(host, what, error or "yes", "a network without a firewall in between", not error, fix)


def not_taken(host: str, reason: str) -> Row:
    """Returns the row of a host that could not be sent what it lacks."""
    return Row(public_name(host), "script's folder", reason, _SPACE, False, on_host(host, _SHOW_SPACE))


def error(rows: Sequence[Row]) -> MeshStartError | None:
    """Returns the error of the rows that are not as they have to be, None if all are."""
    wrong = [row for row in rows if not row.ok]
    if not wrong:
        return None
    first = wrong[0]
    more = f" {len(wrong) - 1} more of {len(rows)} checks failed; the table above has all." if len(wrong) > 1 else ""
    return MeshStartError(
        f"The host {first.host} cannot join: {first.what}: {first.seen}.{more}", first.expected, first.fix, LINK
    )


def _not_reached_by_others(name: str, seen: str) -> Row:
    fix = f"getent hosts {name.rpartition('@')[2]}  # correct /etc/hosts, or name the host by its address"
    return Row(name, "address", seen, "an address that other hosts reach", False, fix)


def _devices(host: str, report: HostReport, wanted: Wanted) -> Row:
    kind = wanted.device_type or ("cuda" if report.gpus else "cpu")
    if kind == "cpu":
        return Row(public_name(host), "devices", f"{report.num_cores} cores")  # more workers than cores are allowed
    seen, needed = len(report.gpus), wanted.per_host or 1
    return Row(
        public_name(host), "devices", f"{seen} GPUs", f"{needed} GPUs", seen >= needed, on_host(host, "nvidia-smi")
    )


def on_host(host: str, command: str) -> str:
    """Returns a line to paste that runs a command on a host."""
    if host.startswith((BY_HAND, BY_KUBERNETES, BY_SLURM)):
        return f"{command}  # on {public_name(host)}"
    if host in LOCAL_NAMES:
        return command
    return f"ssh {host} {shlex.quote(command)}" if "$" in command else f'ssh {host} "{command}"'


def _public(version: str) -> str:
    """Returns a version without what tells builds apart: a controller without a GPU may have torch for CPUs."""
    return version.partition("+")[0]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.0f} MiB"
