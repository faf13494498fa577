"""Records what a forward of few rows draws, and finds how the rows lie in it.

Decides which dim of each draw has the rows. Must not know how workers share what is drawn (`shared_draws.py`).

[Note: coins]
Numbers that all rows share may decide what else is drawn: one number whether a layer is left out, or one number a layer
at once. Two rows draw more than one does on the way to them, and would get others. So they are given the numbers that
the one row got, wherever both draw equally few (`Coins`), and the comparison is repeated with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moreh_ap.parallelizer.data.call_sites import site_of_call
from moreh_ap.parallelizer.rng.drawing_operations import draws_numbers
from moreh_ap.parallelizer.rng.found_rows import FINDS_ROWS, FoundRows
from moreh_ap.parallelizer.rng.shared_draws import MAY_DRAW, Draw, Rows, UnsharedDraw
from moreh_ap.protocol.memory_format import memory_order

_VALUES_DECIDE = frozenset(
    {"poisson", "binomial", "_sample_dirichlet", "_standard_gamma", "rrelu_with_noise", "randperm"}
)
"""Operations of which the values of a row decide how much is drawn for the next."""

_MOST_COINS = 1024
"""How many numbers a draw has at most that may decide about layers. Dropout, which decides nothing, draws more."""


@dataclass(frozen=True)
class Drawn:
    """One operation that drew.

    Attributes:
        name: Its name.
        shape: Of what it drew.
        order: Of the dims in memory.
        site: Where in the code it is.
        groups: For each size into how many groups a mask divided as many rows that it found; 0 if none did.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    site: int = 0
    groups: tuple[int, ...] = ()


class Coins:
    """The few numbers that a forward draws for all rows, which a second forward gets again. See [Note: coins].

    Attributes:
        found: Whether the second forward drew any that the rows leave alone.
    """

    def __init__(self) -> None:
        self.found = False
        self._first: list[Tensor | None] = []
        self._second: Iterator[Tensor | None] | None = None

    def again(self) -> None:
        """From now on the second forward draws."""
        self._second = iter(self._first)

    def pass_on(self, result: Tensor) -> None:
        """Keeps what the first forward draws, and gives it to the second."""
        if self._second is None:
            self._first.append(result.detach().clone() if result.numel() <= _MOST_COINS else None)
            return
        known = next(self._second, None)
        if known is not None and known.shape == result.shape:
            self.found = True
            result.copy_(known)


class DrawRecorder(TorchFunctionMode):
    """While active, notes everything that is drawn, in order.

    Args:
        coins: Gets, or gives, the few numbers that all rows share.
    """

    def __init__(self, coins: Coins | None = None) -> None:
        super().__init__()
        self.drawn: list[Drawn] = []
        self._coins = coins
        self._found = FoundRows()
        self._all = Recording(self._found)

    def __enter__(self) -> DrawRecorder:
        super().__enter__()
        self._all.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._all.__exit__(*raised)
        super().__exit__(*raised)
        if raised[0] is None and len(self._all.drawn) != len(self.drawn):
            names = sorted({draw.name for draw in self._all.drawn})
            raise UnsharedDraw(
                f"random numbers are drawn inside an operation that cannot be looked into ({', '.join(names)})"
            )

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in FINDS_ROWS:
            return self._found.kept(args, kwargs or {}, func(*args, **(kwargs or {})))
        if name not in MAY_DRAW:
            return func(*args, **(kwargs or {}))
        with Recording(self._found, self._coins) as recording:
            result = func(*args, **(kwargs or {}))
        self.drawn += recording.drawn
        return result


class Recording(TorchDispatchMode):
    """While active, notes what operations draw, in order, and what of it is for rows that were `found`.

    `coins` as in `DrawRecorder`."""

    def __init__(self, found: FoundRows | None = None, coins: Coins | None = None) -> None:
        super().__init__()
        self._found = found or FoundRows()
        self.drawn: list[Drawn] = []
        self._coins = coins

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if draws_numbers(func, args, kwargs or {}):
            if not isinstance(result, Tensor):  # fused attention with dropout
                raise UnsharedDraw(f"{func._opname} draws random numbers that it does not return")
            order = memory_order(result) or tuple(range(result.ndim))
            groups = tuple(len(self._found.groups_of(size) or ()) for size in result.shape)
            self.drawn.append(Drawn(func._opname, tuple(result.shape), order, site_of_call(), groups))
            if self._coins is not None:
                self._coins.pass_on(result)
        return result


def draws_of(one_row: Sequence[Drawn], two_rows: Sequence[Drawn], *, may_route: bool = False) -> tuple[Draw, ...]:
    """Returns the draws of a forward, in order.

    Args:
        one_row: What a forward of one row drew.
        two_rows: What the same forward of two rows drew.
        may_route: Whether workers may say how many rows they draw for. See [Note: routed rows].

    Raises:
        UnsharedDraw: No such dim can be told. See [Note: which dim has the rows].
    """
    if [draw.name for draw in one_row] != [draw.name for draw in two_rows]:
        raise UnsharedDraw("how often random numbers are drawn depends on the rows")
    pairs = list(zip(one_row, two_rows, strict=True))
    found = [_rows_in(one, two) for one, two in pairs]
    routed = {two.site: rows for (_, two), rows in zip(pairs, found, strict=True) if rows is not None and rows.groups}
    if routed and not may_route:
        one, two = next(pair for pair in pairs if pair[1].site in routed and pair[0].shape != pair[1].shape)
        raise UnsharedDraw(f"one row draws {one.shape} random numbers, two rows {two.shape}")
    draws = []
    for (_, two), rows in zip(pairs, found, strict=True):
        num_dims, at_site = len(two.shape), routed.get(two.site)
        if at_site is not None:  # by chance as many for both, or twice as many
            draws.append(Draw(two.name, num_dims, at_site, two.site))
        elif rows is None and num_dims in {len(one.order) for one in routed.values()}:
            raise UnsharedDraw(f"whether each row draws its own of {two.shape} random numbers is not clear")
        else:
            draws.append(Draw(two.name, num_dims, rows))
    return tuple(draws)


def _rows_in(one: Drawn, two: Drawn) -> Rows | None:
    if one.shape == two.shape:
        return None
    dims = [dim for dim, sizes in enumerate(zip(one.shape, two.shape)) if sizes[0] != sizes[1]]
    if len(one.shape) != len(two.shape) or len(dims) != 1 or two.shape[dims[0]] < one.shape[dims[0]]:
        raise UnsharedDraw(f"one row draws {one.shape} random numbers, two rows {two.shape}")
    if one.name.rstrip("_") in _VALUES_DECIDE:
        raise UnsharedDraw(f"what {one.name} draws for a row depends on the rows before it")
    if two.shape[dims[0]] == 2 * one.shape[dims[0]]:
        return Rows(dims[0], two.order)
    groups = {drawn.groups[dims[0]] for drawn in (one, two)}  # not the same where the mask's first dim has the rows
    return Rows(dims[0], two.order, groups=max(groups.pop(), 1) if len(groups) == 1 else 1)
