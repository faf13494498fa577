"""What has to be known of commands that are kept for workers that take over: an interface that the session implements.

Must not know commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Noted(NamedTuple):
    """What has to be known of a command that is kept.

    Attributes:
        num_steps: How many optimizer steps it has.
        files: Those that workers read because of it.
        has_snapshot: Whether workers copy in it what they hold.
    """

    num_steps: int
    files: tuple[str, ...] = ()
    has_snapshot: bool = False


class Taken(NamedTuple):
    """How a snapshot went.

    Attributes:
        problem: Why a worker has no copy; empty if all have.
        is_passing: Whether that may be otherwise at the next step.
        is_too_large: Whether there is no memory for copies.
        seconds: What the slowest worker took.
        since_s: Seconds since workers were asked for one before; 0 if they never were.
        num_bytes: Of the copies of all workers.
        needed_s: What it would take, where it would take longer than it may; else 0.
        bound: Why workers under another plan cannot take the copies over; empty if they can.
        largest_bytes: Of the largest of the copies.
    """

    problem: str
    is_passing: bool = False
    is_too_large: bool = False
    seconds: float = 0.0
    since_s: float = 0.0
    num_bytes: int = 0
    needed_s: float = 0.0
    bound: str = ""
    largest_bytes: int = 0


class ReplayRules(Protocol):
    """What the session knows of commands."""

    def note(self, command: Any) -> Noted:
        """Returns what has to be known of a command that is kept."""

    def may_copy(self) -> bool:
        """Returns whether workers may copy what they hold."""

    def next_snapshot(self, most_bytes: int, most_s: float) -> Any:
        """Returns a command that has workers copy what they hold, if that has so many bytes and takes so long."""

    def copy_elsewhere(self) -> None:
        """Has the next copies be written into slots for which there is room; there is no complete one elsewhere."""

    def snapshot_after_error(self, most_bytes: int) -> Any:
        """Returns a message that has workers copy what they hold, all of which have just ended in an error."""

    def taken(self, command: Any, values: Sequence[Any]) -> Taken:
        """Returns how the workers' copies went that a command had them take."""

    def drop(self, command: Any, num_done: int | None) -> None:
        """Called in order with each command that a snapshot replaces, and how many in it were executed (None: all)."""

    def from_snapshot(self, command: Any) -> Any:
        """Returns what is sent to other workers in place of all up to the snapshot in `command`, and of its rest."""

    def behind_snapshot(self, command: Any, values: Sequence[Any]) -> Sequence[Any]:
        """Returns of a command's results, one a worker, those of what follows the snapshot in it."""

    def complete_slot(self) -> int | None:
        """Returns the slot of the snapshot that replaces earlier commands; None without one."""

    def for_others(self, change: Callable[[Any], Any], of_workers: int) -> Callable[[Any], Any]:
        """Returns what changes kept commands of so many workers for others under other plans, which `change` knows."""

    def may_be_others(self, error: BaseException | None) -> bool:
        """Returns whether an error of some workers is one after which others may take over under another plan."""

    def figures(self, command: Any, values: Sequence[Any]) -> Any:
        """Returns what is kept of a command's results, one a worker, to be compared with those of a replay."""

    def again(self, command: Any) -> Any:
        """Returns what is sent to other workers in place of a command that has been answered."""

    def difference(self, before: Any, after: Any) -> str:
        """Returns how figures of a replay differ from those of before; empty if only rounding explains it, or not."""

    def others_took_over(self) -> None:
        """Called when all kept commands were sent to the replacement workers."""

    def say(self, line: str) -> None:
        """Prints a line of the log."""

    def say_more(self, line: str) -> None:
        """Prints a line of a detailed log."""
