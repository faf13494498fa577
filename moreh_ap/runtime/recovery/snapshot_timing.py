"""When workers copy what they hold.

Decides after how many optimizer steps, from what copies and steps take. Must not know what is copied.
"""

from __future__ import annotations

import math

COST = 0.01
"""Of the time of steps, that copies may take. Half of what recovery may cost in all."""

FIRST_STEPS = 10
"""The first copies are taken after so many: then it is known what a copy and the steps between two of them take."""

MOST_STEPS = 200
"""A copy is taken after so many steps, however much it costs: twice as many, and those that are on their way, can be
kept."""

TRIES = 16
"""So often in a row a copy is tried that may be possible at the next forward."""

STEPS: int | None = None
"""In tests: a copy is taken after so many steps, however much it costs."""


class SnapshotTiming:
    """Counts steps, and says when a copy is due."""

    def __init__(self) -> None:
        self._num_steps = self._num_between = 0  # since a copy was asked for, and between that and the one before
        self._wanted, self._num_tries = STEPS or FIRST_STEPS, 0

    def stepped(self, num_steps: int) -> None:
        """Counts steps that are sent."""
        self._num_steps += num_steps

    def is_due(self) -> bool:
        """Returns whether a copy should be taken."""
        return self._num_steps >= self._wanted

    def sent(self) -> None:
        """Records that a copy was asked for."""
        self._num_between, self._num_steps = self._num_steps, 0

    def taken(self, seconds: float, since_s: float) -> None:
        """Records a copy.

        Args:
            seconds: What it took.
            since_s: What workers did since the one before took; 0 if it was the first.
        """
        self._wanted, self._num_tries = STEPS or FIRST_STEPS, 0
        if STEPS is None and since_s > 0 and self._num_between:
            wanted = math.ceil(seconds * self._num_between / (COST * since_s))
            self._wanted = min(MOST_STEPS, max(1, wanted))

    def failed(self, is_soon: bool) -> None:
        """Records that there could be no copy: one is tried with the next forward, or after more steps each time."""
        self._num_tries += 1
        if is_soon and self._num_tries <= TRIES:
            self._wanted = 0
        else:
            self._wanted = min(MOST_STEPS, max(1, 2 * self._wanted))
