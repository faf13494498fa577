"""What a host says of itself before it joins.

Decides which facts are looked up and how, by the standard library and psutil alone: neither torch nor the engine is
imported. Must not know which values are right.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil

from moreh_ap.version import __version__

COMPARED_PACKAGES = ("torch", "torchmonarch", "transformers", "cloudpickle")
"""Objects of these travel between the processes, or take part in every number."""

_GPUS = Path("/proc/driver/nvidia/gpus")
_SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostReport:
    """One host.

    Attributes:
        python: Version of Python.
        executable: Path of its interpreter.
        packages: Versions of what is installed, by distribution; moreh_ap among them.
        time_s: Its clock, in seconds since 1970.
        gpus: Names for CUDA_VISIBLE_DEVICES of the GPUs that a process there sees.
        num_cores: Cores that a process there may use.
        free_memory_bytes: Memory that programs may still take.
        free_shared_memory_bytes: Free space of /dev/shm.
        interfaces: Its addresses, each with the name of the network interface that has it.
        address: Its own address in the connection over which it says this, empty where there is none.
        controller_address: The other end of that connection, seen from there.
        machine: Names the running system: equal on two hosts that are one machine.
    """

    python: str = ""
    executable: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    time_s: float = 0.0
    gpus: tuple[str, ...] = ()
    num_cores: int = 1
    free_memory_bytes: int = 0
    free_shared_memory_bytes: int = 0
    interfaces: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    controller_address: str = ""
    machine: str = ""

    def values(self) -> dict[str, Any]:
        """Returns what is sent."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> HostReport:
        """Returns the report that another host sent; facts that this version does not know are left out."""
        known = {one.name for one in fields(cls)}
        facts: dict[str, Any] = {name: value for name, value in values.items() if name in known}
        return cls(**{**facts, "gpus": tuple(facts.get("gpus", ()))})


def look(environment: Mapping[str, str]) -> HostReport:
    """Returns the report of this host.

    Args:
        environment: Its environment; that of a process which sshd started says over which addresses it is connected.
    """
    client, _, server, _ = (environment.get("SSH_CONNECTION", "").split() + [""] * 4)[:4]
    return HostReport(
        python=platform.python_version(),
        executable=sys.executable,
        packages=packages(),
        time_s=time.time(),
        gpus=_visible_gpus(environment),
        num_cores=len(os.sched_getaffinity(0)),
        free_memory_bytes=int(psutil.virtual_memory().available),
        free_shared_memory_bytes=_free_bytes(_SHARED_MEMORY),
        interfaces=interfaces(),
        address=server,
        controller_address=client,
        machine=running_system(),
    )


def running_system() -> str:
    """Returns what tells one running system from another."""
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else platform.node()


def packages() -> dict[str, str]:
    """Returns the installed versions of what has to be equal, by distribution; this package's is that of its code."""
    found = {"moreh_ap": __version__}
    for name in COMPARED_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def interfaces() -> dict[str, str]:
    """Returns the addresses of this host, each with the name of its network interface."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    }


def _visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the GPUs by the driver's own list, which needs no library. Source: the NVIDIA driver's README, chapter
    "The proc file system interface"."""
    there = [str(number) for number in range(len(list(_GPUS.iterdir())))] if _GPUS.is_dir() else []
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return tuple(there)
    return tuple(name.strip() for name in asked.split(",") if there and name.strip() not in ("", "-1"))


def _free_bytes(folder: Path) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
