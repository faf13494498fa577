"""Whether a forward reads numbers, or compares one with others, that several rows of a batch have made.

Decides which numbers those are. Must not know how rows are tried (`trial/probe.py`).

[Note: numbers that Python reads]
A solver goes on until the residual of all rows together is small: `if (f(z) - z).norm().item() < limit: break`. A few
rows may take as many rounds together as one by one, and then their results are equal, but rows of a later batch would
stop a round earlier or later than on one device. So what is compared is not only what a forward gives, but also the
numbers by which it decides: a row may read what it reads beside others, and a batch what some row of it has. So are
those of a solver in the backward, run by a hook that the forward has put on a tensor (a deep equilibrium model).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from moreh_ap.parallelizer.observation.torch_calls import leaves_of, names
from moreh_ap.parallelizer.row_dims.common_decisions import ASKS, found_by
from moreh_ap.parallelizer.row_dims.selections import Selections, selects_rows
from moreh_ap.protocol.batch import are_numbers

_READ = frozenset({"item", "__float__", "tolist"})
_COMPARE = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "less", "greater", "less_equal", "greater_equal"})
_SWITCH = names(
    "where clamp clip clamp_min clamp_max relu relu6 leaky_relu threshold hardtanh hardsigmoid hardswish hardshrink",
    "softshrink maximum minimum max min amax amin fmax fmin sign sgn heaviside floor ceil round trunc fix frac fmod",
    "floor_divide floordiv remainder mod bool int long short byte char searchsorted bucketize isclose",
    "logical_not logical_and logical_or logical_xor not and or xor invert",
)
"""Functions of numbers that go one way up to a value, and another way beyond it."""
_ASK = _SWITCH | _COMPARE | {"index", "contains", "equal", "allclose", "item", "float", "tolist"}
_MOST_READ = 4096
"""Entries of a tensor that may be numbers to decide by: more are a picture."""
_ROUNDING, _SMALLEST = 1e-4, 1e-6
"""Numbers are equal that differ by this part of themselves, or by this."""
TAKES_ROWS = "the forward takes some of the rows, by their values"
ASKS_NUMBERS = "asks numbers"
READS_NUMBERS = "the forward reads a number that several rows have made, and may decide by it"


class ReadNumbers(Selections):
    """While active, notes what `Selections` does, and the fractions that a forward reads or compares with others.

    Args:
        saw: See `Selections`; gets `ASKS_NUMBERS` if Python reads a `given` number, or one that follows from these, or
            a function switches by it.
        given: Numbers among the arguments.
        module: What may hold numbers to compare them with.

    Attributes:
        numbers: Those numbers, in order.
        decisions: What it decides by for all rows, see `common_decisions.py`.
        of_hooks: The same that hooks read which the forward has put on tensors, once they have run.
    """

    def __init__(
        self, saw: set[str] | None = None, given: Sequence[Tensor] = (), module: nn.Module | None = None
    ) -> None:
        super().__init__(saw)
        self._given = list(given)
        self._held = [] if module is None or not given else [one for one in module.buffers() if are_numbers(one)]
        self.numbers: list[float] = []
        self.of_hooks: list[float] = []
        self.decisions: list[tuple[str, int, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "register_hook":
            return func(args[0], self._noting(*args[1:], **(kwargs or {})))
        if name in _READ and args[0].is_floating_point() and args[0].numel() <= _MOST_READ:
            self.numbers += args[0].detach().flatten().tolist()
        elif name.strip("_") in _COMPARE:
            self.numbers += [float(one.detach()) for one in args[:2] if _is_fraction(one)]
        are_given = self._given and self._follow_from_given(name.strip("_"), args, kwargs or {})
        result = super().__torch_function__(func, types, args, kwargs)
        if are_given:
            self._given += [leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor)]
        found = (ASKS, 0, 0) if self.asks_how_many(func, args) else found_by(func, args, result)
        self.decisions += filter(None, (found,))
        return result

    def _follow_from_given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Says whether a function is given numbers alone, of the arguments or that follow from these."""
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        known = self._given + self._held
        are_given = _is_among(tensors, self._given) and all(_is_among([one], known) for one in tensors)
        if are_given and name in _ASK:
            self._saw.add(ASKS_NUMBERS)
        return are_given

    def _noting(self, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        @functools.wraps(hook)
        def noting(gradient: Tensor) -> Any:
            with ReadNumbers() as noted:
                result = hook(gradient)
            self.of_hooks += noted.numbers
            return result

        return noting


def _is_among(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return any(one is other for one in tensors for other in others)


def _is_fraction(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def why_rows_meet(together: ReadNumbers, apart: Sequence[ReadNumbers]) -> str:
    """Returns in words why rows depend on each other, given what was noted for all of them together and for some apart;
    empty if they do not by anything that was noted.

    Args:
        together: What was noted of all rows.
        apart: What was noted of some of them each time: of all, or once, of those of this worker.
    """
    if selects_rows(together.sizes, [one.sizes for one in apart]):
        return TAKES_ROWS
    return "" if _are_of_rows(together.numbers, [one.numbers for one in apart]) else READS_NUMBERS


def do_hooks_meet_rows(noted: Sequence[ReadNumbers]) -> bool:
    """Says whether hooks in the backward read numbers that several rows have made.

    Args:
        noted: What was noted of all rows, and what of some apart each time; see `why_rows_meet`.
    """
    together, *apart = noted
    return not _are_of_rows(together.of_hooks, [one.of_hooks for one in apart])


def _are_of_rows(together: Sequence[float], apart: Sequence[Sequence[float]]) -> bool:
    alone = [number for numbers in apart for number in numbers]
    return _are_among(together, alone) if len(apart) > 1 else _are_among(alone, together)


def _are_among(some: Sequence[float], others: Sequence[float]) -> bool:
    """Says whether each of some numbers is, but for rounding, one of the others. Those that are not finite count as
    equal."""
    return all(
        not math.isfinite(one)
        or any(math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_SMALLEST) for other in others)
        for one in some
    )
