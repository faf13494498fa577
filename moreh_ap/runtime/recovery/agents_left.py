"""Agents that go on when a worker group ends, for another one: they keep the copies of what its workers held.

Decides which go on. Must not know why the group ends, nor what the other one does with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from moreh_ap.runtime.host.host_connection import HostConnection


class AgentsLeft:
    """Those agents.

    Attributes:
        are_left: Whether any go on.
        hosts: Theirs, if `leave` was told.
    """

    def __init__(self) -> None:
        self.are_left = False
        self.hosts: Sequence[HostConnection] = ()

    def leave(self, hosts: Sequence[HostConnection] = ()) -> None:
        """Has agents go on. Any thread may call this.

        Args:
            hosts: Theirs; none: all hosts that are used, or those that were named before.
        """
        self.hosts = hosts or self.hosts
        self.are_left = True

    def for_next(self, used: Sequence[HostConnection]) -> list[HostConnection]:
        """Returns the agents for the next worker group, and ends the others; the workers end once others are asked for.

        Args:
            used: The hosts of this group.
        """
        left = list(self.hosts or used)
        for one in left:
            one.on_message = lambda message: None
        for one in used:
            if one not in left:
                one.end_soon()
        return left
