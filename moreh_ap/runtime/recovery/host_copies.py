"""The copies of what workers on several hosts hold, each in memory of the agent of its host.

Decides how large a copy may be on all of them. Must not know what is in a copy, nor how a host's workers find it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Sequence

from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError
from moreh_ap.runtime.host.serving import Serving
from moreh_ap.runtime.recovery.copy_memory import most_copy_bytes


class HostCopies:
    """Implements `CopyKeeper`.

    Args:
        connections: The hosts.
        serving: What their agents have said.
        per_host: Workers of each.
    """

    def __init__(self, connections: Sequence[HostConnection], serving: Collection[Serving], per_host: int) -> None:
        self._connections, self._serving, self._per_host = connections, serving, per_host

    def most_bytes(self) -> int:
        if not all(one.copies for one in self._serving):
            return 0
        sharing = Counter(one.report.machine for one in self._connections)  # containers of one machine
        kept = self._per_host * min(2, len(self._connections))  # its own, and those of the host before it
        return min(
            most_copy_bytes(one.free_bytes + one.copied_bytes, sharing[one.report.machine] * kept)
            for one in self._connections
        )

    def close(self) -> None:
        for one in self._connections:
            with contextlib.suppress(HostLostError):  # its memory is gone with it
                one.send("forget")
