"""A forward on some items of a batch: the few numbers that are those of the whole batch are exchanged.

Decides what happens at each place in the code where items meet, as learned beforehand. Must not know how that is
learned (`items.item_probe`), what the items are, models or plans.

[Note: where items meet]
A detection model computes most of what it does picture by picture, and meets the other pictures in numbers: to what
size all are padded, by what a loss is divided, how many boxes there are. Each such number belongs to a place in the
code (`call_sites.py`) and to how often that place was reached. There, workers exchange their numbers and go on with
the sum or the largest, as `ItemRules` says. Places that are reached once an item are no such places.

[Note: exchanges]
Every exchange has the same size and carries the place, so workers that have come to different places notice it, all of
them, in that exchange. So does a worker whose forward is over, or has failed: it goes to a last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moreh_ap.parallelizer.items.item_results import Merge, TogetherWith
from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.mean_functions import EXTREMES, SMALLEST, is_extreme
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.observation.call_sites import site_of_call
from moreh_ap.parallelizer.observation.torch_calls import leaves_of, map_leaves
from moreh_ap.parallelizer.rng.row_stream import Round, RowStream
from moreh_ap.parallelizer.rng.shared_draws import MAY_DRAW, Draw, Share
from moreh_ap.parallelizer.statistics.batch_statistics import JoinedReduction, all_gather
from moreh_ap.protocol.batch import row_range
from moreh_ap.protocol.objects.batch_items import find_items

Place = tuple[int, int]
"""A place in the code, and how often it was reached before."""

OWN, SUM, LARGEST, PER_ITEM = "own", "sum", "largest", "per item"
"""How workers get a number of a place: it is each worker's own, the sum or the largest of all, or one for each item."""

_DIVISIONS = {"__truediv__", "__itruediv__", "div", "div_", "true_divide", "true_divide_", "divide", "divide_"}
_MAKES_SIZES = {"new_full", "new_zeros", "new_ones", "new_empty", "zeros", "ones", "full", "empty"}
_COUNTS = {"sum", "count_nonzero"}
_LARGEST = EXTREMES - SMALLEST
_MOST_NUMBERS = 6
_RESULT = 1
"""The place of the result, which no line has."""


@dataclass(frozen=True)
class ItemRules:
    """What trials learned of a forward on items.

    Attributes:
        numbers: What the numbers at a place are.
        draws: How the rows of all items lie in what is drawn at a place.
        rounds: In which order items draw at places that are reached for each item.
        merge: How the results of workers go together; None: they are left apart.
        counts: Whether whole numbers that are sums are such numbers.
        may_lack: Whether a worker may have items that lack what others have; None where none was tried.
    """

    numbers: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    draws: Mapping[Place, tuple[Draw, ...]] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()
    merge: Merge | None = None
    counts: bool = True
    may_lack: bool | None = None


class ItemSites(GlobalReduction):
    """Sees every place of a forward where items may meet."""

    counts_items = True
    """Whether sums that are whole numbers are looked at."""

    def numbers_at(self, what: str, site: int, numbers: Sequence[float]) -> Sequence[float]:
        """Returns the numbers with which the forward goes on at a place."""
        raise NotImplementedError

    def replay(self, sites: slice) -> GlobalReduction:
        return ItemReplay(self.device, self.global_denominators[sites])

    def draw_at(self, site: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the result of a function that may draw random numbers."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in MAY_DRAW:
            return self.draw_at(site_of_call(), func, args, kwargs)
        if name in _DIVISIONS and len(args) > 1:
            args = (args[0], self._divisor(args[1]), *args[2:])
        elif name in _MAKES_SIZES:
            args, kwargs = self._sizes(args, kwargs)
        result = super().__torch_function__(func, types, args, kwargs)
        if name in _COUNTS and self.counts_items and _is_whole_number(result):
            result = self._number("count", result)
        elif func in _LARGEST and is_extreme(args, kwargs):  # a length to which items are padded later
            result = self._number("size", result)
        return result

    def _divisor(self, divisor: Any) -> Any:
        is_number = type(divisor) in (int, float)
        if isinstance(divisor, Tensor) and type(divisor) is Tensor:
            is_number = divisor.ndim == 0 and not divisor.requires_grad and divisor.dtype is not torch.bool
        return self._number("divide", divisor) if is_number else divisor

    def _numbers_here(self, what: str, numbers: Sequence[float]) -> Sequence[float]:
        found = self.numbers_at(what, site_of_call(), numbers)
        self.global_denominators.append(torch.tensor(found, dtype=torch.float64))
        return found

    def _number(self, what: str, number: Any) -> Any:
        own = float(number)
        (found,) = self._numbers_here(what, [own])
        if found == own:
            return number
        return torch.full_like(number, found) if isinstance(number, Tensor) else type(number)(found)

    def _sizes(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        sizes = [leaf for leaf in leaves_of((args, kwargs)) if type(leaf) is int]
        if not 0 < len(sizes) <= _MOST_NUMBERS:
            return args, kwargs
        found = list(map(int, self._numbers_here("size", sizes)))
        if found == sizes:
            return args, kwargs
        left = iter(found)
        args, kwargs = map_leaves(lambda leaf: next(left) if type(leaf) is int else leaf, (args, kwargs))
        return args, kwargs

    def _share(self, total: Tensor, count: Tensor | int) -> Tensor:
        (everywhere,) = self._numbers_here("mean", [float(count)])
        return (total / torch.tensor(everywhere, dtype=torch.float64, device=total.device)).to(total.dtype)


class ItemReplay(ItemSites):
    """A part of a forward of items that is computed again, with the numbers of the first time: nothing is exchanged.

    Args:
        device: This worker's device.
        numbers: Those at each place of the part, in order.
    """

    def __init__(self, device: torch.device, numbers: Sequence[Tensor], **others: Any) -> None:
        super().__init__(device, record=True, **others)
        self._left = iter(numbers)

    def numbers_at(self, what: str, site: int, numbers: Sequence[float]) -> Sequence[float]:
        found: list[float] = next(self._left).tolist()
        return found

    def draw_at(self, site: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class _SharedReplay(ItemReplay, JoinedReduction):
    """The same for a worker's items, whose normalisations take the statistics of those of all workers once more."""


class ItemReduction(ItemSites, JoinedReduction):
    """The forward of a worker's items in a split call.

    Args:
        device, axis, mark, meets_failed: See `GlobalReduction`.
        rules: What was learned of the forward.
        draws_together: Whether workers draw from one stream.
        keeps_rows: Whether results with a row for each item stay with its worker, where items are rows.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        axis: Axis,
        rules: ItemRules,
        draws_together: bool,
        keeps_rows: bool = True,
        mark: Callable[[], int] | None = None,
        meets_failed: bool = False,
    ) -> None:
        super().__init__(device, axis=axis, mark=mark, meets_failed=meets_failed)
        self._rules, self._keeps_rows = rules, keeps_rows
        self._row_length: int | None = None
        self.counts_items = rules.counts
        self._reached: Counter[int] = Counter()
        self._rows = RowStream(axis, rules.rounds, device) if draws_together else None
        self._problem = ""
        self._has_diverged = False

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        items = find_items(args, kwargs)
        if items is None or items.count < self.axis.size:  # every worker has the whole arguments and finds the same
            raise Diverged("a batch has fewer items than there are devices, or none that are known")
        shares = [range(*row_range(rank, self.axis.size, items.count)) for rank in range(self.axis.size)]
        if not self._rules.may_lack and any(map(items.lacks, shares)):
            self._has_diverged = True
            raise Diverged("a device has no row with a picture, which the forward needs", is_of_kind=False)
        own = shares[self.axis.rank]
        self._own_items, self._all_items = len(own), items.count
        self._row_length = items.row_length if self._keeps_rows else None
        return items.select(own)

    def replay(self, sites: slice) -> GlobalReduction:
        return _SharedReplay(self.device, self.global_denominators[sites], axis=self.axis)

    def finish(self, result: Any, settled: Callable[[Any], Any]) -> Any:
        if self._rules.merge is None:
            return result
        together = TogetherWith(self._rules.merge, settled(result), self._own_items, self._row_length)
        self._problem = self._problem or together.problem
        self._exchange_at(_RESULT)
        result, self.kinds = together.put_together(self.axis)
        return result

    def numbers_at(self, what: str, site: int, numbers: Sequence[float]) -> Sequence[float]:
        place = site, self._reached[site]
        self._reached[site] += 1
        rules = self._rules.numbers.get(place)
        if rules is None or len(rules) != len(numbers):
            return numbers
        if rules == (PER_ITEM,):
            return [number / self._own_items * self._all_items for number in numbers]
        all_WN = self._exchange_at(site, numbers)
        if what == "divide" and SUM in rules and (all_WN <= 1).any():
            # It may be max(1, count), of which the sum is not that of the whole batch. All workers see it.
            self._has_diverged = True
            raise Diverged("a worker's part of what a loss is divided by is one or less")
        return [_joined(rule, of_all, own) for rule, of_all, own in zip(rules, all_WN.T.tolist(), numbers)]

    def draw_at(self, site: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        place = site, self._reached[site]
        self._reached[site] += 1
        if self._rows is None:
            return func(*args, **kwargs)
        draws = self._rules.draws.get(place)
        if draws and any(draw.rows is not None and draw.rows.are_packed for draw in draws):
            self._exchange_at(site)
            share = Share(*row_range(self.axis.rank, self.axis.size, self._all_items), self._all_items)
            return self._rows.draw_packed(draws, func, args, kwargs, share)
        if draws:
            return self._rows.draw_rows(draws, func, args, kwargs, lambda own: self._exchange_at(site, [own])[:, 0])
        if self._rows.is_for_each_item(site):
            if self._rows.begins_round(site):
                self._exchange_at(site)
                self._rows.begin(self._own_items)
            elif not self._rows.goes_on(site):
                self._problem = "rows decide what the forward draws"
            return self._rows.draw_for_item(func, args, kwargs)
        return func(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("batch_norm", "instance_norm"):
            self._exchange_at(site_of_call())  # statistics are exchanged in another form
        return super().__torch_function__(func, types, args, kwargs)

    def _exchange_at(self, site: int, numbers: Sequence[float] = (), mark: int = 0) -> Tensor:
        """Returns the numbers of all workers at a place, of shape (workers, numbers), on the CPU.

        Raises:
            Diverged: Others are elsewhere, or one of them has met a problem; raised on all of them.
        """
        if self._rows is not None and self._rows.close():
            self._problem = self._problem or "rows decide what the forward draws"
        own = torch.zeros(2 + _MOST_NUMBERS, dtype=torch.float64)
        own[0], own[1] = site, _FAILED if self._problem else mark
        own[2 : 2 + len(numbers)] = torch.tensor(list(numbers), dtype=torch.float64)
        own = own.to(self.device)
        everyone = own.new_empty(self.axis.size * len(own))
        all_gather(everyone, own, group=self.axis.group)
        all_WN = everyone.view(self.axis.size, -1).cpu()
        reason = ""
        if (all_WN[:, 1] == _FAILED).any():
            reason = self._problem or "the forward of some items raised an error, or drew other random numbers"
        elif (all_WN[:, 0] != site).any():
            reason = "items decide where they meet others in the forward"
        elif (all_WN[:, 1] != mark).any():
            reason = "items decide what the forward draws"
        if reason:
            self._has_diverged = True
            raise Diverged(reason)
        return all_WN[:, 2 : 2 + len(numbers)]

    def _meet(self, mark: int) -> None:
        if not self._has_diverged:  # else the other workers take part in no further exchange
            self._exchange_at(0, mark=mark)


_FAILED = 2**16  # as in `loss_reduction.py`: the mark of a forward that raised


def _is_whole_number(result: Any) -> bool:
    is_number = isinstance(result, Tensor) and result.ndim == 0
    return is_number and not result.is_floating_point() and not result.is_complex()


def _joined(rule: str, of_all: Sequence[float], own: float) -> float:
    return own if rule == OWN else sum(of_all) if rule == SUM else max(of_all)
