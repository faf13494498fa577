"""The copies of what workers on several hosts hold, each in memory of the agent of its host.

Decides how large a copy may be on all of them. Must not know what is in a copy, nor how a host's workers find it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Sequence

from moreh_ap.protocol.messages.memory_files import MemoryFile
from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError
from moreh_ap.runtime.host.serving import Serving
from moreh_ap.runtime.recovery.copy_memory import NUM_SLOTS, SHARE, in_words, most_copy_bytes


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
        return min(most_copy_bytes(self._room(one), sharing[one.report.machine] * kept) for one in self._connections)

    def fits(self, num_bytes: int) -> bool:
        sharing = Counter(one.report.machine for one in self._connections)
        needed = NUM_SLOTS * num_bytes  # of a host, whose workers and those of the one before it may be all there are
        return all(sharing[one.report.machine] * needed <= SHARE * self._room(one) for one in self._connections)

    def move_to_disk(self, num_bytes: int) -> tuple[Sequence[MemoryFile], str]:
        fullest = min(map(self._room, self._connections))
        may = f"{SHARE:.0%} of the {in_words(fullest)} of memory that are free on the fullest host"
        return (), f"two need {in_words(NUM_SLOTS * num_bytes)}, and may take {may}"

    def close(self) -> None:
        for one in self._connections:
            with contextlib.suppress(HostLostError):  # its memory is gone with it
                one.send("forget")

    @staticmethod
    def _room(one: HostConnection) -> int:
        return one.free_bytes + one.copied_bytes
