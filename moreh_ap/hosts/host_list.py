"""The hosts that a script is given, as a person writes them.

Decides how a list, a comma-separated text or a file names hosts, and how each is reached. Must not know what is done
with them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from moreh_ap.errors import OptionError
from moreh_ap.hosts.clusters import kubernetes, slurm

BY_HAND = "tls://"
SLURM = "slurm"
BY_SLURM = "slurm:"
KUBERNETES = "kubernetes"
BY_KUBERNETES = "kubernetes:"
SSH_VARIABLE = "MOREH_SSH"
LINK = "docs/several-machines.md"
_FILE_NAMES = (".txt", ".lst", ".conf", ".cfg")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")

# What ssh is given as its destination: a name of its configuration, a host name or an address, with a user or without.
_SSH_NAME = re.compile(r"(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9_:%](?:[A-Za-z0-9._:%-]*)")
_BY_HAND = re.compile(r"tls://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})/([0-9a-f]{64})/([A-Za-z0-9_-]{32,})")


def parse_hosts(given: object, name: str = "hosts") -> tuple[str, ...]:
    """Returns the hosts that an argument or variable names, each as it was written.

    Args:
        given: A list of hosts, a text with commas between them, the path of a file with one in each line, or "slurm" or
            "kubernetes", for those of the job in which this process runs.
        name: What the value was given as, for errors.

    Raises:
        OptionError: It names no host, one twice, or something that is no host; or this process runs in no such job.
    """
    if given == SLURM:
        return tuple(BY_SLURM + node for node in slurm.nodes(os.environ))
    if given == KUBERNETES:
        return tuple(BY_KUBERNETES + pod for pod in kubernetes.pods(os.environ))
    if isinstance(given, str):
        file = file_of_hosts(given)
        try:
            entries = _lines(file) if file else given.split(",")
        except (OSError, ValueError) as error:  # it is not text
            raise _error(name, f"{name}={given!r} cannot be read as a list of hosts: {error}") from error
    elif isinstance(given, Sequence) and all(isinstance(entry, str) for entry in given):
        entries = list(given)
    else:
        raise _error(name, f"{name}={given!r} ({type(given).__name__})")
    hosts = tuple(entry.strip() for entry in entries if entry.strip())
    if not hosts:
        raise _error(name, f"{name}={given!r} names no host")
    if isinstance(given, str) and given.endswith(_FILE_NAMES) and hosts == (given.strip(),):
        raise _error(name, f"{name}={given!r}: there is no file {os.path.abspath(given)}")
    for host in hosts:
        address, _, port = host.rpartition(":")
        if port.isdecimal() and address and ":" not in address and not host.startswith(BY_HAND):
            raise OptionError(
                f"{name}: {host!r} has a port, which ssh does not take with the name",
                f"{address!r}, and the port in ~/.ssh/config or in {SSH_VARIABLE}",
                f'export {SSH_VARIABLE}="ssh -p {port}"',
                LINK,
            )
        if host.startswith(BY_HAND) and not _BY_HAND.fullmatch(host):
            fact = f"{name}: the line of an agent at {public_name(host)!r} is not whole"
            whole = "the line as `moreh-ap host` has printed it: tls://ADDRESS:PORT/FINGERPRINT/TOKEN"
            raise OptionError(fact, whole, "moreh-ap host  # on that host: prints another one", f"{LINK}#by-hand")
        if not host.startswith(BY_HAND) and not _SSH_NAME.fullmatch(host):
            raise _error(name, f"{name}: {host!r} is no host")
    twice = sorted({public_name(host) for host in hosts if hosts.count(host) > 1})
    if twice:
        raise _error(name, f"{name} names {', '.join(twice)} more than once")
    local = [host for host in hosts if host in LOCAL_NAMES]
    if len(local) > 1:
        raise _error(name, f"{name} names this machine more than once: {', '.join(local)}")
    return hosts


def file_of_hosts(given: object) -> str:
    """Returns the path of the file that is meant, if an argument or variable names one; else nothing."""
    is_file = isinstance(given, str) and given not in (SLURM, KUBERNETES) and "," not in given and Path(given).is_file()
    return os.path.abspath(str(given)) if is_file else ""


def by_hand(host: str) -> tuple[str, int, str, str]:
    """Returns address, port, fingerprint of the certificate and token of an agent that was started by hand."""
    found = _BY_HAND.fullmatch(host)
    assert found is not None, "parse_hosts accepts no other"
    address, port, fingerprint, token = found.groups()
    return address.strip("[]"), int(port), fingerprint, token


def public_name(host: str) -> str:
    """Returns what a log may say of a host: without the secrets of an agent that was started by hand."""
    if not host.startswith(BY_HAND):
        return host.removeprefix(BY_SLURM).removeprefix(BY_KUBERNETES)
    return host.removeprefix(BY_HAND).partition("/")[0]


def is_name_of_machine(host: str) -> bool:
    """Returns whether a host was given as a name of a machine: not as an agent's line, a node or a pod of a job."""
    return not host.startswith((BY_HAND, BY_SLURM, BY_KUBERNETES))


def _lines(path: str) -> list[str]:
    return [line.partition("#")[0] for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _error(name: str, fact: str) -> OptionError:
    """Returns the error for hosts that were given as `name`: an argument, an option or a variable."""
    lines = "lines that `moreh-ap host` has printed"
    allowed = f"names that ssh knows, or {lines}: as a list, with commas, or a file with one in each line"
    fix = 'torch.moreh.option.enable_advanced_parallelization(hosts=["node1", "node2"])'
    if name.startswith("--"):
        fix = f"moreh-ap doctor {name} node1,node2"
    elif name != "hosts":
        fix = f"export {name.rpartition(' ')[2]}=node1,node2"
    return OptionError(fact, allowed, fix, LINK)
