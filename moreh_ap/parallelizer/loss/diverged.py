"""The exception for a forward in which the rows of different workers take different branches."""

from __future__ import annotations

from moreh_ap.errors import ExactnessError


class Diverged(Exception):
    """The workers' rows took different branches of a forward. Raised on all workers, after all have finished it.

    Args:
        reason: Why, as the end of a sentence.
        is_of_kind: Whether other calls of the kind may do so, too; else it is about this one.
    """

    def __init__(self, reason: str, *, is_of_kind: bool = True) -> None:
        super().__init__(reason)
        self.is_of_kind = is_of_kind

    def after_changes(self) -> ExactnessError:
        """Returns the error of such a forward that cannot be computed once more, since it changes buffers."""
        return ExactnessError(
            f"{self}, and it changes buffers",
            "such a forward without buffers that it changes",
            "MOREH_NUM_DEVICES=1 python train.py",
        )
