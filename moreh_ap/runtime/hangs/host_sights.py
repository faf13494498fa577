"""What an agent sees of the workers of its host, as the controller needs it to find those that hang.

Decides how it is said; see [Note: sights of hosts] in `workers_of_hosts.py`. Must not know what is a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moreh_ap.runtime.hangs.stack_answers import ask
from moreh_ap.runtime.hangs.worker_sights import WorkerClocks
from moreh_ap.runtime.relay.command_relay import CommandRelay


class HostSights:
    """Looks at workers again and again.

    Args:
        look_s: How often at least.
    """

    def __init__(self, look_s: float) -> None:
        self._clocks = WorkerClocks(look_s)

    def look(self, pids: Mapping[int, int], commands: CommandRelay, start: int) -> dict[str, Any]:
        """Returns what is sent.

        Args:
            pids: The workers' processes, by rank.
            commands: What hands commands on to them.
            start: The start of the workers.

        Returns:
            `start`; the `oldest` command that workers have not answered, or None; the `silent` ones by their place on
            this host; and of `workers` the rank and what belongs to a `Sight`.
        """
        oldest, silent = commands.oldest()
        workers = [[rank, *sight] for rank, sight in self._clocks.look(pids).items()]
        return {"start": start, "oldest": oldest, "silent": silent, "workers": workers}


def tell_stacks(pids: Mapping[int, int], tell: Callable[..., None]) -> None:
    """Tells the controller what the workers of this host say of themselves; takes some seconds."""
    tell("stacks", said=[[rank, *said] for rank, said in ask(pids).items()])
