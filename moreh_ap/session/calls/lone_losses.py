"""A loss that is not finite in the part of one worker alone.

Decides from the parts of a loss that workers answer anyway whether that is said. Must not know where the loss is read.

[Note: one worker alone]
A loss whose parts are summed here comes from workers that have equal parameters and rows of their own. Where one part
alone is not finite, either its rows make it so, or its device computes wrongly. What comes later tells no more: by then
the sum of gradients has made the parameters of all workers NaN.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from moreh_ap.local import logger
from moreh_ap.protocol.messages.tensors import LeafReply


class HasWorkers(Protocol):
    """Knows how many workers there are."""

    num_devices: int


class LoneLosses:
    """Says once of each worker that its part of a loss alone is not finite. See [Note: one worker alone]."""

    def __init__(self, session: HasWorkers) -> None:
        self._session = session
        self._said: set[int] = set()

    def look_at(self, parts: Sequence[LeafReply]) -> None:
        """Looks at the parts of a loss that is not finite, in rank order of the workers that have one."""
        wrong = [index for index, part in enumerate(parts) if not part.tensor().isfinite().all()]
        if len(wrong) != 1 or len(parts) == 1 or wrong[0] in self._said:
            return
        self._said.add(wrong[0])
        each_has_one = len(parts) == self._session.num_devices
        where = f"that of worker {wrong[0]}" if each_has_one else f"part {wrong[0] + 1} of {len(parts)} of the batch"
        logger.say(
            f"a loss is not finite, and of its parts only {where}: these rows of the batch make it so, or a device "
            "computes wrongly (docs/recovery.md#nan)",
            logging.WARNING,
        )
