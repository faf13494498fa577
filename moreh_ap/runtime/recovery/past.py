"""What is handed on from workers that have ended to others under other plans.

Decides nothing: see [Note: another plan] in `recovering_group.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from moreh_ap.runtime.recovery.command_log import CommandLog
from moreh_ap.runtime.recovery.copy_memory import CopyMemory


class Past(NamedTuple):
    """What workers knew that have been ended, for others under other plans.

    Attributes:
        log: The commands that they had answered.
        copies: Memory with copies of what they held.
        number: That of the last one.
        epoch: How many errors had been raised, with the one because of which they were ended.
        reason: Why they were ended, for the log.
        is_loss: Whether one of them was lost.
    """

    log: CommandLog
    copies: CopyMemory
    number: int
    epoch: int
    reason: str
    is_loss: bool
