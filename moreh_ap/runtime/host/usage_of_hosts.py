"""What the workers of all hosts use, as their agents have said it.

Decides what is shown of a worker on another host. Must not know who shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from moreh_ap.local.jobs import RemoteWorker
from moreh_ap.runtime.host.host_connection import HostConnection


class UsageOfHosts:
    """Turns what agents say into what is shown.

    Args:
        per_host: Workers of a host.
        threads: Threads of each worker's mathematics.
        device_type: "cuda" or "cpu"; of GPUs there are no readings.
    """

    def __init__(self, per_host: int, threads: int, device_type: str) -> None:
        self._per_host, self._threads, self._is_cpu = per_host, threads, device_type == "cpu"

    def of_all(self, connections: Sequence[HostConnection]) -> list[RemoteWorker]:
        """Returns what each worker uses, as far as its agent has said it."""
        return [
            RemoteWorker(
                rank,
                one.name,
                pid,
                used_bytes if self._is_cpu else None,
                one.usage["memory_bytes"] // self._per_host if self._is_cpu else 0,
                busy if self._is_cpu else None,
                min(float(self._threads), one.report.num_cores / self._per_host) if self._is_cpu else 1.0,
            )
            for one in connections
            for rank, pid, used_bytes, busy in one.usage.get("workers", ())
        ]
