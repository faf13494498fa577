"""Records what a forward of few rows draws, and finds how the rows lie in it.

Decides which dim of each draw has the rows. Must not know how workers share what is drawn (`shared_draws.py`).

[Note: coins]
Numbers that all rows share may decide what else is drawn: one number whether a layer is left out, or one number a layer
at once. Two rows draw more than one does on the way to them, and would get others. So they are given the numbers that
the one row got, wherever both draw equally few (`Coins`), and the comparison is repeated with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moreh_ap.parallelizer.observation.call_sites import is_called_here, site_of_call
from moreh_ap.parallelizer.rng.drawing_operations import draws_numbers, with_one_row
from moreh_ap.parallelizer.rng.found_rows import FINDS_ROWS, FoundRows
from moreh_ap.parallelizer.rng.packed_sequences import lengths_in
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
        are_packed: Whether it is for the steps of packed sequences.
        groups: For each size into how many groups a mask divided as many rows that it found; 0 if none did.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    site: int = 0
    groups: tuple[int, ...] = ()
    are_packed: bool = False


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
        no_rows = with_one_row(name, args, kwargs or {})
        if no_rows is not None:
            self._note_no_rows(func, no_rows, kwargs or {})
        coins = None if is_called_here() else self._coins  # the seed of a region decides nothing
        with Recording(self._found, coins) as recording:
            result = func(*args, **(kwargs or {}))
        are_packed = lengths_in(name, args) is not None
        self.drawn += [replace(draw, are_packed=True) for draw in recording.drawn] if are_packed else recording.drawn
        return result

    def _note_no_rows(self, func: Callable[..., Any], one_row: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes what is drawn for no rows here, where other workers may have some."""
        state = torch.default_generator.get_state()
        with Recording(self._found) as recording:
            func(*one_row, **kwargs)
        torch.default_generator.set_state(state)
        drawn = [replace(draw, shape=(0, *draw.shape[1:])) for draw in recording.drawn]
        self.drawn += drawn
        self._all.drawn[len(self._all.drawn) - len(drawn) :] = drawn


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


def draws_of(
    one_row: Sequence[Drawn],
    two_rows: Sequence[Drawn],
    second_row: Sequence[Drawn] | None = None,
    *,
    may_route: bool = False,
    may_permute: bool = False,
) -> tuple[Draw, ...]:
    """Returns the draws of a forward, in order.

    Args:
        one_row: What a forward of one row drew.
        two_rows: What the same forward of two rows drew.
        second_row: What the same forward of the second of them drew; None where it is not known.
        may_route: Whether workers may say how many rows they draw for. See [Note: routed rows] in `shared_draws.py`.
        may_permute: Whether a worker may have a part of a permutation of all rows, since it can gather rows.

    Raises:
        UnsharedDraw: No such dim can be found. See [Note: which dim has the rows] in `shared_draws.py`.
    """
    if [draw.name for draw in one_row] != [draw.name for draw in two_rows]:
        raise UnsharedDraw("how often random numbers are drawn depends on the rows")
    pairs = list(zip(one_row, two_rows, strict=True))
    others = second_row if second_row is not None and len(second_row) == len(pairs) else one_row
    found = [_rows_in(one, two, other, may_permute) for (one, two), other in zip(pairs, others, strict=True)]
    routed = {two.site: rows for (_, two), rows in zip(pairs, found, strict=True) if rows is not None and rows.groups}
    if routed and not may_route:
        one, two = next(pair for pair in pairs if pair[1].site in routed)
        raise UnsharedDraw(f"one row draws {one.shape} random numbers, two rows {two.shape}")
    draws = []
    for (_, two), rows in zip(pairs, found, strict=True):
        num_dims, at_site = len(two.shape), routed.get(two.site)
        if at_site is not None:  # by chance as many for both, or twice as many
            draws.append(Draw(two.name, num_dims, at_site, two.site))
        elif rows is None and num_dims in {len(one.order) for one in routed.values()}:
            raise UnsharedDraw(f"whether each row draws its own of {two.shape} random numbers is not clear")
        else:
            draws.append(Draw(two.name, num_dims, rows, place=two.site))
    return tuple(draws)


def _rows_in(one: Drawn, two: Drawn, other: Drawn, may_permute: bool) -> Rows | None:
    if two.are_packed:
        return Rows(0, (0, 1), groups=1, are_packed=True)
    if one.shape == two.shape:
        return None
    dims = [dim for dim, sizes in enumerate(zip(one.shape, two.shape)) if sizes[0] != sizes[1]]
    if len(one.shape) != len(two.shape) or len(dims) != 1:
        raise UnsharedDraw(f"one row draws {one.shape} random numbers, two rows {two.shape}")
    if one.name.rstrip("_") in _VALUES_DECIDE and not (may_permute and one.name == "randperm"):
        raise UnsharedDraw(f"what {one.name} draws for a row depends on the rows before it")
    if two.shape[dims[0]] == 2 * one.shape[dims[0]] and other.shape == one.shape:
        return Rows(dims[0], two.order, has_several=one.shape[dims[0]] > 1)
    groups = {drawn.groups[dims[0]] for drawn in (one, two)}  # not the same where the mask's first dim has the rows
    return Rows(dims[0], two.order, groups=max(groups.pop(), 1) if len(groups) == 1 else 1)
