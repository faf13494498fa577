"""What the workers of this host use, as its agent tells the controller.

Decides what is read of a living process, and that it costs next to nothing. Must not know who shows it. Readings of
GPUs are not among it: the driver's library would have to be there, and loaded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import psutil

from moreh_ap.local.memory_limit import free_memory, memory_limit


class WorkerUsage:
    """Looks at workers again and again; how busy they were is known from the second time on."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}  # when a process was looked at, and its CPU seconds then
        self._memory_bytes = memory_limit()

    def look(self, pids: Mapping[int, int]) -> dict[str, Any]:
        """Returns what is sent.

        Args:
            pids: The process of each rank.

        Returns:
            `memory_bytes` of this host, of which `free_bytes` are free, and `workers`: rank, process, bytes in memory,
            and cores that were busy since the last look, None the first time.
        """
        found = []
        for rank, pid in sorted(pids.items()):
            try:
                process = psutil.Process(pid)
                times, used_bytes = process.cpu_times(), int(process.memory_info().rss)
            except psutil.Error:  # it has just ended
                continue
            now_s, cpu_s = time.monotonic(), times.user + times.system
            before = self._seen.get(pid)
            self._seen[pid] = now_s, cpu_s
            busy = None if before is None or now_s <= before[0] else (cpu_s - before[1]) / (now_s - before[0])
            found.append([rank, pid, used_bytes, busy])
        return {"memory_bytes": self._memory_bytes, "free_bytes": free_memory(), "workers": found}
