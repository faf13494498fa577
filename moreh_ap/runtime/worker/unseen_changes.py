"""Warnings of effects of the script's code in a worker that the script does not see.

Decides what is looked at: files that a forward writes, numbers that change in a backward (a forward that an adjoint
method runs there, with a counter in it), random numbers that a backward draws. Must not know how the script is warned.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.rng.common_seeds import TAKEN
from moreh_ap.parallelizer.rng.policy import current_streams
from moreh_ap.protocol.module_attributes import Attributes
from moreh_ap.protocol.script_code.written_files import take_written


class UnseenChanges:
    """Warnings of one model.

    Args:
        kind: The class of the model, as the script knows it.
        attributes: The model's attributes, if those that change in a backward are looked at.

    Attributes:
        warnings: Those that were not sent to the script yet.
        known: The kinds of calls of which a backward has been looked at.
    """

    def __init__(self, kind: type, attributes: Attributes | None) -> None:
        self._title, self._attributes = f"forward() of {kind.__name__}", attributes
        self.warnings: list[str] = []
        self.known: set[Hashable] = set()
        self._seeds_anew = False

    def note_effects(self) -> None:
        """Has the script warned of files that were written. Records that a forward has taken seeds: what its backward
        draws then, nobody knows on one device either."""
        self._seeds_anew |= bool(TAKEN)
        TAKEN.clear()
        for file in take_written():
            self.warnings.append(
                f"{self._title} writes {file} in every worker, each for its rows of the batch, and in trial runs "
                "before the first call. Return what is to be written, or write it in a forward hook, which writes in "
                "the script alone. See: docs/limits.md#models"
            )

    @contextmanager
    def looking_at_backward(self, kind: Hashable, may_draw: bool = False) -> Iterator[None]:
        """Has the script warned of numbers among the attributes that change inside.

        Args:
            kind: What the call has in common with others.
            may_draw: Whether the forward runs inside, too.

        Raises:
            UnsupportedError: The backward draws from streams that the script goes on from, in another order.
        """
        self.known.add(kind)
        before = {} if self._attributes is None else self._attributes.marks()
        streams = None if may_draw or self._seeds_anew else current_streams()
        yield
        if streams is not None and streams != current_streams():
            raise UnsupportedError(
                f"the backward through {self._title} draws random numbers, which are not those of one device.",
                allowed="Random numbers in forward; in the backward of a torch.autograd.Function of the script, which "
                "runs in the script's process then.",
                fix="ctx.save_for_backward(torch.rand(...))  # drawn in its forward",
            )
        changed = [] if self._attributes is None else self._attributes.changed(before).items()
        names = [name for name, value in changed if isinstance(value, (bool, int, float)) and name in before]
        if names:
            self.warnings.append(
                f"{self._title} changes {', '.join(names)} when it runs in a backward, which only the workers see. "
                "Count in the script, or compute without the adjoint method. See: docs/limits.md#models"
            )
