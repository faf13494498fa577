"""When workers were lost, by the command at which it happened.

Decides when losses are too many to be coincidence. Must not know commands, nor what is done about a loss.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque

MOST_LOSSES, LOSSES_WITHIN_S = 3, 600.0
"""More losses than this at one command, within so many seconds, are no coincidence: the command causes them."""


class Losses:
    """Counts losses at each command."""

    def __init__(self) -> None:
        self._times_s: defaultdict[int, deque[float]] = defaultdict(deque)

    def why_too_many(self, number: int | None) -> str:
        """Records a loss, and returns why it was one too many; empty if it was not.

        Args:
            number: The command at which it happened; None: between two.
        """
        if number is None:
            return ""
        now_s, times_s = time.monotonic(), self._times_s[number]
        times_s.append(now_s)
        while now_s - times_s[0] > LOSSES_WITHIN_S:
            times_s.popleft()
        return f"workers were lost {len(times_s)} times at the same command" if len(times_s) > MOST_LOSSES else ""
