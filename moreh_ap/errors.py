"""The failures a user can meet, one class each, with the remedy in the message.

Decides how an error reads: the fact with its values, what is allowed, a line to paste, where to read more.
Must not know torch, the engine or any other module of this package: everything may import it, workers too.
"""

from __future__ import annotations


class MorehError(RuntimeError):
    """Base of every error that this package raises on purpose.

    The text has up to four lines. All four parts are kept in `args`, so an error survives pickling unchanged.

    Args:
        fact: What happened, with the values that made it happen.
        allowed: What would have been accepted.
        fix: A line that the user can paste.
        link: Where the documentation says more; by default the section of `docs/errors.md` named after the class.

    Example:
        >>> print(PlanError("shard=0 is no group size", "an integer of at least 1", 'plan="shard=2"'))
        shard=0 is no group size
        Allowed: an integer of at least 1
        Try: plan="shard=2"
        See: docs/errors.md#planerror
    """

    def __init__(self, fact: str, allowed: str = "", fix: str = "", link: str = "") -> None:
        super().__init__(fact, allowed, fix, link)
        self.fact = fact
        self.allowed = allowed
        self.fix = fix
        self.link = link or f"docs/errors.md#{type(self).__name__.lower()}"

    def __str__(self) -> str:
        lines = [self.fact]
        if self.allowed:
            lines.append(f"Allowed: {self.allowed}")
        if self.fix:
            lines.append(f"Try: {self.fix}")
        lines.append(f"See: {self.link}")
        return "\n".join(lines)


class OptionError(MorehError, ValueError):
    """An argument or environment variable has a value that cannot be used."""


class PlanError(MorehError, ValueError):
    """A plan is malformed, does not match the devices, or does not fit their memory."""


class WorkerError(MorehError):
    """A worker raised an exception that could not be brought over with its own type."""


class WorkerLostError(MorehError):
    """A worker process died, or stopped answering, while the script needed it."""


class MeshStartError(MorehError):
    """The worker processes could not be started."""


class UnsupportedError(MorehError):
    """The request is understood, but this version cannot honour it."""


class ExactnessError(MorehError):
    """Going on would give other numbers than one device gives, so the work stops here."""


class NotComputedError(MorehError):
    """A value is asked for that workers have not computed, because of an error that was raised before."""


class UnsplitError(MorehError):
    """Every device would compute the whole batch, and ``MOREH_STRICT=1`` asks for an error instead."""


class TrialError(MorehError):
    """Trying a forward on a few rows failed by a fault of this package, and ``MOREH_STRICT=1`` asks for an error."""


class TrialWarning(UserWarning):
    """Trying a forward on a few rows failed by a fault of this package; the batch may not be split for that reason."""


class LoadError(MorehError):
    """A weight could not be read: a tensor is missing from its file or has another shape."""
