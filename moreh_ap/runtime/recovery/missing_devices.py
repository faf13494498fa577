"""Devices of this machine that were gone when workers were lost, and may be there again.

Decides when as many workers as before are tried again. Must not know plans, nor what was wrong with a device.

[Note: trying devices again]
Whether a device works is known once a worker has started on it, for which the present workers have to end: so devices
are not looked at meanwhile, and a try costs what a loss costs. The first one is made half a minute after the loss, and
each further one after twice as long.
"""

from __future__ import annotations

import time

from moreh_ap.runtime.recovery.other_devices import Joined

FIRST_S = 30.0
"""After the first loss."""

LONGEST_S = 1800.0
"""Between two tries at most."""


class MissingDevices:
    """Remembers how many workers there were. See [Note: trying devices again]."""

    def __init__(self) -> None:
        self._num_workers = 0
        self._wait_s, self._not_before_s = 0.0, 0.0

    def lost(self, num_workers: int) -> None:
        """Notes the number of workers before fewer took over."""
        self._num_workers = max(self._num_workers, num_workers)
        self._wait_s = min(2 * self._wait_s or FIRST_S, LONGEST_S)
        self._not_before_s = time.monotonic() + self._wait_s

    def back(self, num_workers: int) -> Joined | None:
        """Returns the devices that are tried again now, now that others can take over; None: none are.

        Args:
            num_workers: How many workers there are.
        """
        if num_workers >= self._num_workers or time.monotonic() < self._not_before_s:
            return None
        fact = f"{self._num_workers} workers on this machine again, {num_workers} since a device was gone."
        return Joined(fact, self._num_workers, ())
