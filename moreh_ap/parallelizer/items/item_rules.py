"""What forwards of all items, of the first and of the others noted, compared: where items meet, and how.

Decides the rules. Must not know how the forwards were run or whether the rules are all that is needed; `item_probe.py`
shows that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from moreh_ap.parallelizer.items.item_recorder import Noted, Total
from moreh_ap.parallelizer.items.item_reduction import LARGEST, OWN, PER_ITEM, SUM, ItemRules, Place
from moreh_ap.parallelizer.items.item_results import (
    ITEM_ROWS,
    ITEMS,
    NODE,
    PACKED,
    ROWS,
    SAME,
    SHARE,
    Merge,
    packed_together,
    parts_of,
)
from moreh_ap.parallelizer.rng.draw_recording import Drawn
from moreh_ap.parallelizer.rng.row_stream import Round
from moreh_ap.parallelizer.rng.shared_draws import Draw, Rows
from moreh_ap.parallelizer.trial.dry_run import Refused
from moreh_ap.parallelizer.trial.row_comparison import close, kind_of

Places = Mapping[Place, Noted]


def find_sizes(whole: Places, first: Places, others: Places, *, is_ragged: bool) -> dict[Place, Total]:
    """Returns the sizes that are the largest of all items'.

    Args:
        whole: What the forward of all items noted.
        first: What that of the first items noted.
        others: What that of the other items noted.
        is_ragged: Whether items differ in size.
    """
    found = {}
    for place, noted in whole.items():
        if noted.what == "size" and _is_common(place, whole, first, others):
            rules = _sizes(list(zip(noted.numbers, first[place].numbers, others[place].numbers)), is_ragged)
            if LARGEST in rules:
                found[place] = Total(rules, noted.numbers)
    return found


def find_counts(whole: Places, first: Places, others: Places) -> dict[Place, Total]:
    """Returns the counts that are sums of those of the first items and of the others; arguments as `find_sizes`."""
    return {
        place: Total((SUM,), noted.numbers)
        for place, noted in whole.items()
        if noted.what == "count" and _is_common(place, whole, first, others)
        if first[place].numbers[0] + others[place].numbers[0] == noted.numbers[0]
    }


def find_rules(
    whole: Places,
    first: Places,
    others: Places,
    *,
    totals: Mapping[Place, Total],
    items: tuple[int, int],
    sizes: set[tuple[int, int]],
    counts: bool,
) -> ItemRules:
    """Returns the rules of a forward, with no word about its result.

    Args:
        whole: What the forward of all items noted.
        first: What that of the first items noted, with the `totals` of all.
        others: What that of the other items noted, likewise.
        totals: See `find_sizes` and `find_counts`.
        items: How many the first and the others are.
        sizes: Of each dim of the items, the sums over the first and over the others.
        counts: Whether whole numbers that are sums were looked at.

    Raises:
        Refused: The items draw in a way that is not known.
    """
    numbers = {place: total.rules for place, total in totals.items()}
    draws: dict[Place, tuple[Draw, ...]] = {}
    in_loops: list[int] = []
    for place, noted in whole.items():
        is_common = _is_common(place, whole, first, others)
        if noted.what == "draw":
            if not is_common:
                in_loops += [place[0]] if noted.drawn else []
            elif noted.drawn:
                found = _draws(noted.drawn, first[place].drawn, others[place].drawn)
                if any(draw.rows is not None for draw in found):
                    draws[place] = found
        elif is_common and noted.what == "mean":
            numbers[place] = (SUM,)
        elif is_common and noted.what == "divide":
            rule = _divisor(noted.numbers[0], first[place].numbers[0], others[place].numbers[0], items, sizes)
            if rule != OWN:
                numbers[place] = (rule,)
    return ItemRules(numbers, draws, _rounds(in_loops, sum(items)), counts=counts)


def _is_common(place: Place, *runs: Places) -> bool:
    """Says whether all runs reach a place equally often, so that it is not in a loop over items."""
    site, _ = place
    often = {sum(1 for other, _ in run if other == site) for run in runs}
    return len(often) == 1 and len({(run[place].what, len(run[place].numbers)) for run in runs}) == 1


def _sizes(triples: Sequence[tuple[float, float, float]], is_ragged: bool) -> tuple[str, ...]:
    rules = []
    for of_all, of_first, of_others in triples:
        if of_all == of_first + of_others:
            rules.append(OWN)  # so many for each item
        elif of_all != max(of_first, of_others):
            return (OWN,)
        else:
            rules.append(LARGEST if is_ragged or of_first != of_others else OWN)
    return tuple(rules)


def _divisor(whole: float, first: float, others: float, items: tuple[int, int], sizes: set[tuple[int, int]]) -> str:
    if whole == first == others:
        return OWN
    if (first, others, whole) == (*items, sum(items)) and items not in sizes:
        return PER_ITEM
    if math.isclose(whole, first + others, rel_tol=1e-6):
        return SUM
    return LARGEST if whole == max(first, others) else OWN


def _draws(whole: Sequence[Drawn], first: Sequence[Drawn], others: Sequence[Drawn]) -> tuple[Draw, ...]:
    if not [one.name for one in whole] == [one.name for one in first] == [one.name for one in others]:
        raise Refused("how often random numbers are drawn depends on the items")
    return tuple(
        Draw(of_all.name, len(of_all.shape), _rows(of_all, *parts)) for of_all, *parts in zip(whole, first, others)
    )


def _rows(whole: Drawn, first: Drawn, others: Drawn) -> Rows | None:
    if whole.are_packed:
        return Rows(0, (0, 1), groups=1, are_packed=True)
    if whole.shape == first.shape == others.shape:
        return None
    if len(whole.shape) == len(first.shape) == len(others.shape):
        sums = [one + other for one, other in zip(first.shape, others.shape)]
        dims = [dim for dim, size in enumerate(whole.shape) if not size == first.shape[dim] == others.shape[dim]]
        if len(dims) == 1 and sums[dims[0]] == whole.shape[dims[0]]:
            return Rows(dims[0], whole.order)
    raise Refused(f"{whole.name} draws {whole.shape} random numbers, and not those of the items in turn")


def _rounds(sites: Sequence[int], items: int) -> tuple[Round, ...]:
    """Returns the loops over items in which they draw, given where all of them did, in order."""
    rounds, start = [], 0
    while start < len(sites):
        left = sites[start:]
        length = next((one for one in range(1, len(left) // items + 1) if _repeats(left, one, items)), None)
        if length is None:
            raise Refused("how often random numbers are drawn depends on the items")
        rounds.append(Round(tuple(left[:length])))
        start += length * items
    if max(Counter(site for one in rounds for site in set(one.sites)).values(), default=0) > 1:
        raise Refused("random numbers are drawn for each item by the same line in several loops")
    return tuple(rounds)


def _repeats(sites: Sequence[int], length: int, items: int) -> bool:
    return list(sites[: length * items]) == list(sites[:length]) * items


def find_merge(whole: Any, parts: Sequence[Any], items: Sequence[int], tolerance: float) -> Merge:
    """Returns how results of some items each go together.

    Args:
        whole: The result of all items.
        parts: Those of some of them each, in order.
        items: How many items each part is of.
        tolerance: Which differences are rounding; see `row_comparison.py`.

    Raises:
        Refused: They do not go together.
    """
    if _is_listed(whole, sum(items)) and all(_is_listed(part, number) for part, number in zip(parts, items)):
        alike = [one for part in parts for one in part]
        for one, other in zip(whole, alike, strict=True):
            _check_equal(one, other, tolerance)
        return Merge(ITEMS)
    if isinstance(whole, PackedSequence) and all(isinstance(part, PackedSequence) for part in parts):
        _check_equal(whole, packed_together(parts), tolerance)
        return Merge(PACKED)
    inside, spec = parts_of(whole)
    if spec.is_leaf():
        dim = _dim_of_rows(whole, parts, tolerance)
        return Merge(ROWS, dim=dim) if dim else Merge(_kind_of_leaf(whole, parts, items, tolerance))
    insides = [parts_of(part) for part in parts]
    if any(other != spec for _, other in insides):
        raise Refused("the result of some items nests differently from that of all")
    return Merge(
        NODE,
        tuple(
            find_merge(part, [found[number] for found, _ in insides], items, tolerance)
            for number, part in enumerate(inside)
        ),
    )


def _is_listed(value: Any, items: int) -> bool:
    return type(value) in (list, tuple) and len(value) == items


def _dim_of_rows(whole: Any, parts: Sequence[Any], tolerance: float) -> int:
    """Returns along which dim but the first the parts follow each other; 0 for none."""
    if not isinstance(whole, Tensor) or not all(isinstance(part, Tensor) and part.ndim == whole.ndim for part in parts):
        return 0
    for dim in range(1, whole.ndim):
        others = [[size for at, size in enumerate(part.shape) if at != dim] for part in (whole, *parts)]
        is_sum = sum(part.shape[dim] for part in parts) == whole.shape[dim]
        if is_sum and others.count(others[0]) == len(others) and close(torch.cat(list(parts), dim), whole, tolerance):
            return dim
    return 0


def _kind_of_leaf(whole: Any, parts: Sequence[Any], items: Sequence[int], tolerance: float) -> str:
    tensors = isinstance(whole, Tensor) and whole.ndim > 0 and all(isinstance(part, Tensor) for part in parts)
    if tensors and all(part.ndim and part.shape[1:] == whole.shape[1:] for part in parts):
        number = sum(part.shape[0] for part in parts)
        if whole.shape[0] == number and close(torch.cat(list(parts)), whole, tolerance):
            return ITEM_ROWS if [len(part) for part in parts] == list(items) else ROWS
    kind = kind_of("the result", whole, parts, tolerance)
    if kind in ("opaque", "count"):
        raise Refused("the result has an object that cannot be compared, or a number that depends on the items")
    return SHARE if kind == "share" else SAME


def _check_equal(one: Any, other: Any, tolerance: float) -> None:
    inside, spec = parts_of(one)
    others, other_spec = parts_of(other)
    if spec != other_spec:
        raise Refused("the result for an item nests differently without the other items")
    if not spec.is_leaf():
        for both in zip(inside, others, strict=True):
            _check_equal(*both, tolerance)
    elif isinstance(one, Tensor):
        if not isinstance(other, Tensor) or not close(other, one, tolerance):
            raise Refused("the result for an item depends on the other items")
    elif one is not other and one != other:
        raise Refused("the result for an item depends on the other items")
