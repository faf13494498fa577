"""When workers copy what they hold.

Decides after how many optimizer steps, from what copies and steps take. Must not know what is copied.
"""

from __future__ import annotations

import math
import time

COST = 0.01
"""Of the time of steps, that copies may take. Half of what recovery may cost in all."""

EARLY_COST = 0.05
"""Of the time of steps so far, that the first copy may take where commands become too many to be kept without one."""

FIRST_STEPS = 10
"""The first copies are taken after so many: then it is known what a copy and the steps between two of them take."""

MOST_STEPS = 200
"""A copy is taken after so many steps, however much it costs: twice as many, and those that are on their way, can be
kept."""

MOST_FRUGAL_STEPS = 1000
"""The same where a copy is taken only when it costs what it may."""

FIRST_S = 5.0
"""There: no copy before steps have been sent for so long. A run that is shorter has none."""

NUM_COLD = 2
"""So many first copies go to memory that was never touched, and take up to ten times as long as others."""

TRIES = 16
"""So often in a row a copy is tried that may be possible at the next forward."""

STEPS: int | None = None
"""In tests: a copy is taken after so many steps, however much it costs."""


class SnapshotTiming:
    """Counts steps, and says when a copy is due.

    Args:
        is_frugal: Whether no copy is taken that costs more than `COST`, the first one included.

    Attributes:
        num_steps: Steps since a copy was asked for.
        wanted: A copy is due after so many.
        num_failed: Copies in a row that could not be.
        costs_too_much: Whether copies cost more than twice `COST`, as rarely as they may be.
    """

    def __init__(self, *, is_frugal: bool = False) -> None:
        self._is_frugal = is_frugal and STEPS is None
        self.num_steps = self._num_between = 0  # the latter: between that copy and the one before
        self.wanted, self.num_failed = STEPS or FIRST_STEPS, 0
        self.costs_too_much = False
        self._num_taken, self._num_trained = 0, 0
        self._first_s, self._rests_s = 0.0, FIRST_S

    def stepped(self, num_steps: int) -> None:
        """Counts steps that are sent."""
        if not self._first_s:
            self._first_s = time.monotonic()
        self.num_steps += num_steps
        self._num_trained += num_steps

    def is_affordable(self) -> bool:
        """Returns whether a copy may be taken now, if enough steps were sent."""
        return not self._is_frugal or self._num_taken > 0 or self._trained_s() >= self._rests_s

    def most_s(self, *, is_early: bool = False) -> float:
        """Returns what the next copy may take."""
        cost = EARLY_COST if is_early else COST
        return cost * self._trained_s() if self._is_frugal and not self._num_taken else math.inf

    def _trained_s(self) -> float:
        return time.monotonic() - self._first_s if self._first_s else 0.0

    def sent(self) -> None:
        """Records that a copy was asked for."""
        self._num_between, self.num_steps = self.num_steps, 0

    def taken(self, seconds: float, since_s: float) -> None:
        """Records a copy.

        Args:
            seconds: What it took.
            since_s: What workers did since the one before took; 0 if it was the first.
        """
        self.wanted, self.num_failed = STEPS or FIRST_STEPS, 0
        if self._is_frugal and not self._num_taken:
            since_s, self._num_between = self._trained_s(), self._num_trained
        self._num_taken += 1
        if STEPS is None and since_s > 0 and self._num_between:
            wanted = math.ceil(seconds * self._num_between / (COST * since_s))
            most = MOST_FRUGAL_STEPS if self._is_frugal else MOST_STEPS
            self.costs_too_much = self._is_frugal and self._num_taken > NUM_COLD and wanted > 2 * most
            self.wanted = min(most, max(1, wanted))

    def failed(self, is_soon: bool, needed_s: float = 0.0) -> None:
        """Records that there could be no copy.

        Args:
            is_soon: Whether it is tried with the next forward; if not, after twice as many steps each time.
            needed_s: What it would take, where that was more than it may; 0: that was not the reason.
        """
        self.num_failed += 1
        if needed_s:
            self._rests_s = needed_s / COST
        elif is_soon and self.num_failed <= TRIES:
            self.wanted = 0
        else:
            self.wanted = min(MOST_STEPS, max(1, 2 * self.wanted))
