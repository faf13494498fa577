"""The copies of what workers on several hosts hold, each in memory of the agent of its host, or on its disk.

Decides how large a copy may be on all of them. Must not know what is in a copy, nor how a host's workers find it.

[Note: each host by itself]
Where one host has no room in its memory, all are asked for room in other slots, which have the same numbers everywhere:
each keeps them in memory if it has room there, else on its disk. If one has neither, none uses them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError
from moreh_ap.runtime.host.serving import Serving
from moreh_ap.runtime.recovery.copy_memory import NUM_SLOTS, SHARE, CopyMemory, most_copy_bytes

_TIMEOUT_S = 60.0  # making two files


class HostCopies:
    """Implements `CopyKeeper`.

    Args:
        connections: The hosts.
        serving: What their agents have said.
        per_host: Workers of each.
        known: What the agents of hosts that join later have to know.
    """

    def __init__(
        self,
        connections: Sequence[HostConnection],
        serving: Collection[Serving],
        per_host: int,
        known: CopyMemory | None,
    ) -> None:
        self._connections, self._serving, self._per_host, self._known = connections, serving, per_host, known
        sharing = Counter(one.report.machine for one in connections)  # containers of one machine
        self._sharing = [sharing[one.report.machine] for one in connections]
        self._kept = per_host * min(2, len(connections))  # its own, and those of the host before it

    def most_bytes(self) -> int:
        if not all(one.copies for one in self._serving):
            return 0
        of_each = zip(self._connections, self._sharing)
        return min(most_copy_bytes(one.room_for_copies, num * self._kept) for one, num in of_each)

    def fits(self, num_bytes: int) -> bool:
        needed = NUM_SLOTS * num_bytes  # of a host, whose workers and those of the one before it may be all there are
        return all(num * needed <= SHARE * one.room_for_copies for one, num in zip(self._connections, self._sharing))

    def move_to_disk(self, num_bytes: int, largest_bytes: int) -> tuple[bool, str]:
        """See [Note: each host by itself]."""
        needed = min(num_bytes, self._kept * largest_bytes)
        on_disk: dict[str, str] = {}
        for one, num in zip(self._connections, self._sharing):
            has_room, why = self._ask(one, num * needed)
            if not has_room:
                for other in self._connections:
                    self._ask(other, 0)
                return False, f"on {one.name}, {why}"
            if why:
                on_disk[one.name] = why
        if self._known is not None:
            self._known.on_each_host_bytes = needed
        first, why = next(iter(on_disk.items()), ("", ""))
        names = f"those of {', '.join(on_disk)}; " if len(on_disk) > 1 else ""
        return True, why and f"{names}on {first}, {why}"

    @staticmethod
    def _ask(one: HostConnection, num_bytes: int) -> tuple[bool, str]:
        """Has a host make room; returns what `CopyMemory.make_room` does there."""
        try:
            answer = one.ask("room", _TIMEOUT_S, num_bytes=num_bytes).values
        except HostLostError:  # who waits for its workers says so, and others take over on the hosts that have room
            return True, ""
        one.usage = {**one.usage, "room_for_copies": answer["room_for_copies"]}
        return answer["has_room"], answer["why"]

    def close(self) -> None:
        for one in self._connections:
            with contextlib.suppress(HostLostError):  # its memory is gone with it
                one.send("forget")


def told_to_agents(copies: CopyMemory | None, num_workers: int) -> dict[str, Any]:
    """Returns what agents are told of the copies of so many workers: their number, the slot that is needed, room."""
    if copies is None:
        return {"copies": 0, "kept": None, "room": 0}
    return {"copies": num_workers, "kept": copies.kept, "room": copies.on_each_host_bytes}
