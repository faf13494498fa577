"""Tries one function, or module, of a forward on two slices of the rows.

Decides whether it works row by row, gives summands, or needs the rows of all workers. Must not know the forward
(`lockstep.py`).

[Note: lockstep]
Every tensor that has rows, or is a summand, has a double: what two workers would have instead. A function is called
with the tensors and with their doubles, and the results are compared. What works is taken, in this order: as the
arguments are; with summands added up; with all rows gathered, which is always right. A result counts as a sum only
where a function is known to be linear, since zeros add up to anything. What is made of added summands alone is one
device's, also where it is zero in a trial: the entropy of rows that all go one way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moreh_ap.parallelizer.data.row_gathering import has_first_rows
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.mean_functions import OBSERVES, takes_statistics
from moreh_ap.parallelizer.loss.mean_rules import MeanRules
from moreh_ap.parallelizer.observation.row_functions import (
    ADDED_TO,
    ADDING,
    DRAWS,
    LINEAR,
    REORDERS,
    SCALING,
    SUMS,
    WRITING,
)
from moreh_ap.parallelizer.observation.torch_calls import leaves_of, map_leaves, tensors_of
from moreh_ap.parallelizer.rng.policy import streams_untouched
from moreh_ap.parallelizer.rng.routed_rows import drawn_in_turn
from moreh_ap.parallelizer.rng.shared_draws import Draw
from moreh_ap.parallelizer.row_dims.common_decisions import BesideOthers, of_several_rows
from moreh_ap.parallelizer.row_dims.placements import Placements
from moreh_ap.parallelizer.row_dims.read_numbers import ReadNumbers, why_rows_meet
from moreh_ap.parallelizer.row_dims.row_numbers import RowCount
from moreh_ap.parallelizer.row_dims.row_steps import SHARE, Placement, Rows, Step
from moreh_ap.parallelizer.surroundings.placement import OwnDevice
from moreh_ap.parallelizer.trial.dry_run import Refused, refuse_states_of_others
from moreh_ap.parallelizer.trial.row_comparison import check_denominators, close


@dataclass(frozen=True)
class Double:
    """The tensors that two workers have in place of one. Where it numbers entries of rows, those of the second worker
    begin `shift` lower; see `own_entries.py`."""

    placement: Placement
    slices: tuple[Tensor, Tensor]
    shift: int = 0


class Trial:
    """One function or module, tried on slices of its arguments.

    Args:
        device: This worker's device.
        rows: How many rows each slice has.
        tolerance: Which differences are rounding; see `row_comparison.py`.
        func: What to call.
        name: The name of its step.
        arguments: Positional and keyword ones.
        doubles: For each leaf of them what two workers have, None for what is one device's.
        follows: See `Step`.
        within: Which numbers in a module are those of the batch, and what is drawn from the common stream.
        made: The tensors that the forward makes of numbers alone.
    """

    def __init__(
        self,
        device: torch.device,
        rows: tuple[int, int],
        tolerance: float,
        func: Callable[..., Any],
        name: str,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        doubles: Sequence[Double | None],
        follows: tuple[RowCount, ...],
        within: tuple[MeanRules, Sequence[Draw]],
        made: Placements,
    ) -> None:
        self._device, self._rows, self._func, self._name = device, rows, func, name
        (self._args, self._kwargs), self._leaves = arguments, leaves_of(arguments)
        self._doubles, self._made = doubles, made
        self._follows, self._tolerance, self._within = follows, tolerance, within
        self._mutates = self._kwargs.get("out") is not None or (name.endswith("_") and not name.endswith("__"))
        self._mutates = self._mutates or name in WRITING
        placements = [double.placement for double in doubles if double is not None]
        self._has_rows = any(isinstance(one, Rows) for one in placements)
        self._shift = max((double.shift for double in doubles if double is not None), default=0)
        self._shares = [double for double in doubles if double is not None and double.placement == SHARE]
        self.takes_means = has_first_rows(placements)
        self._adds_to_more = self._adds_to_one_device_s()

    def decide_on_module(self) -> tuple[Step, Sequence[Double | None]] | None:
        """Returns the step of a module that works row by row, and what its results are; None if rows meet in it, or it
        takes means of what every worker has. Every call draws for its rows; the streams are left as they were."""
        (rules, draws), total = self._within, sum(self._rows)
        device, drawing = self._cuda(), drawn_in_turn(draws, total)
        recording = GlobalReduction(self._device, record=True, rules=rules) if self.takes_means else nullcontext()
        with streams_untouched(device), recording as full, ReadNumbers() as together, drawing(0, total):
            args, kwargs = map_leaves(lambda leaf: leaf, (self._args, self._kwargs))  # a module may add to a dict
            wanted = [leaf.detach() for leaf in tensors_of(self._func(*args, **kwargs))]
        denominators, counts = ((), ()) if full is None else (full.global_denominators, full.local_denominators)

        def run_apart(adds_up: bool, for_all: bool, *modes: AbstractContextManager[Any]) -> Sequence[Double] | None:
            results, counted, ends = [], [], (0, self._rows[0], total)
            for which in (0, 1):
                args, kwargs = self._slice_of((self._args, self._kwargs), which, adds_up, for_all)
                reduction = GlobalReduction(self._device, denominators=denominators, rules=rules)
                own = reduction if self.takes_means else nullcontext()
                try:
                    with streams_untouched(device), own, modes[which], drawing(*ends[which : which + 2]):
                        made = tensors_of(self._func(*args, **kwargs))
                    counted.append(reduction.local_denominators)
                    check_denominators(counts if which else (), counted)
                    results.append([leaf.detach() for leaf in made])
                except Exception:  # whatever the module raises for such slices: it does not work on them
                    return None
            return self._compare(wanted, results)

        for adds_up, for_all in self._ways() if wanted and self._has_rows else ():
            apart = ReadNumbers(), ReadNumbers()
            found = run_apart(adds_up, for_all, *apart)
            if found is None or why_rows_meet(together, apart):
                continue
            which = of_several_rows(together.decisions, [one.decisions for one in apart])
            if which and run_apart(adds_up, for_all, BesideOthers(which), BesideOthers(which)) is None:
                continue
            if all(isinstance(double.placement, Rows) for double in found):
                return self._step(adds_up, for_all, found), found
        return None

    def decide(self) -> tuple[Step, Any, Sequence[Double | None]]:
        """Returns the step, the result for all rows, and what two workers have in place of its tensors."""
        if self._func in (F.batch_norm, OBSERVES) and takes_statistics(self._func, self._args, self._kwargs):
            return self._normalise()
        if self._name in DRAWS or self._name == "empty_like":  # what is in the memory of the latter says nothing
            return self._draw()
        before = self._cloned() if self._mutates else (self._args, self._kwargs)
        full = GlobalReduction(self._device, record=True)
        states = self._states()
        with streams_untouched(self._cuda()):
            result = self._call(full, self._args, self._kwargs)
            draws = not all(map(torch.equal, states, self._states()))
        if draws:
            return self._draw_inside()
        wanted = [leaf.detach() for leaf in self._outcome(result, self._args)]
        for _ in range(2):
            for adds_up, for_all in self._ways() if wanted else ():
                found = self._attempt(before, full.global_denominators, wanted, adds_up, for_all)
                if found is not None:
                    return self._step(adds_up, for_all, found), result, found
            if not self._has_rows or self._mutates:
                break
            self._doubles = self._cut_again()
        if self._shift:
            raise Refused(f"{self._name} gets numbers of entries, and rows depend on each other")
        written = self._doubles[0] if self._mutates else None
        if written is not None and written.placement != SHARE:
            raise Refused(f"{self._name} writes to rows what depends on others")
        step = replace(self._step(True, True, ()), gathers=self._has_rows, results=(None,) * len(wanted))
        order = self._new_order(wanted)
        if order is not None:
            return replace(step, cuts=True, results=(order,)), result, [cut(result, order, self._rows)]
        return step, result, [None] * len(tensors_of(result))

    def _new_order(self, wanted: Sequence[Tensor]) -> Rows | None:
        """Returns where a result has rows that are those of the first argument in another order; None if it has not."""
        pairs = zip(self._leaves, self._doubles, strict=True)
        tensors, given = zip(*((leaf, double) for leaf, double in pairs if isinstance(leaf, Tensor)), strict=True)
        is_index = self._name in REORDERS[1] and any(
            double is not None and isinstance(double.placement, Rows) and double.slices[0].dtype == torch.int64
            for double in given[1:]
        )
        first = None if given[0] is None else given[0].placement
        if not (is_index or self._name in REORDERS[0]) or len(wanted) != 1 or not isinstance(first, Rows):
            return None
        has_as_many = first.dim < wanted[0].ndim and wanted[0].shape[first.dim] == tensors[0].shape[first.dim]
        return first if has_as_many else None

    def _cut_again(self) -> list[Double | None]:
        """Returns what two workers have, without the rounding of the way to here: of numbers that are zero but for
        rounding (a new policy's distance from the old one) it would be all there is."""
        doubles: list[Double | None] = []
        for leaf, double in zip(self._leaves, self._doubles, strict=True):
            placement = None if double is None else double.placement
            known = placement if isinstance(placement, Rows) and not self._shift else None
            doubles.append(double if known is None else cut(leaf, known, self._rows))
        return doubles

    def _step(self, adds_up: bool, for_all: bool, found: Sequence[Double]) -> Step:
        placements = tuple(double.placement for double in found)
        follows, writes = self._follows, self._mutates
        return Step(self._name, adds_up=adds_up, follows=follows, for_all=for_all, writes=writes, results=placements)

    def _outcome(self, result: Any, args: tuple[Any, ...]) -> list[Tensor]:
        """Returns the tensors that a function made or wrote to."""
        return [args[0]] if self._name == "__setitem__" else tensors_of(result)

    def _ways(self) -> list[tuple[bool, bool]]:
        """Returns what to try: whether summands are added up, and whether numbers are those of the whole batch."""
        numbers = (False, True) if self._follows else (False,)
        ways = [(True, for_all) for for_all in numbers] if self._has_rows else []
        if self._shares and self._may_stay_summands():
            ways = [(False, for_all) for for_all in numbers] + ways
        return ways

    def _may_stay_summands(self) -> bool:
        """Says whether a sum may be taken of summands: only with others, or with numbers, none of them zero."""
        tensors = [double for leaf, double in zip(self._leaves, self._doubles, strict=True) if isinstance(leaf, Tensor)]
        alone = all(double is not None and double.placement == SHARE for double in tensors)
        numbers = [leaf for leaf in leaves_of(self._args) if isinstance(leaf, (int, float, complex))]
        is_scaled = len(numbers) == 1 and "rounding_mode" not in self._kwargs
        if (self._name in ADDING and any(numbers)) or (self._name in SCALING and not is_scaled):
            return False  # each worker would add the number; a product of sums is not the sum of products
        slices = [one for share in self._shares for one in share.slices]
        return alone and self._name in LINEAR and all(bool(one.any()) for one in slices)

    def _adds_to_one_device_s(self) -> bool:
        """Says whether the function adds to a tensor of one device that may be another than zero in a later call."""
        position, args, kwargs = ADDED_TO.get(self._name), self._args, self._kwargs
        if position is None:
            return False
        given = args[position] if position < len(args) else kwargs.get("bias", kwargs.get("input"))
        is_one_device_s = all(leaf is not given or double is None for leaf, double in zip(self._leaves, self._doubles))
        return isinstance(given, Tensor) and is_one_device_s and (self._made.get(given) is None or bool(given.any()))

    def _call(self, reduction: GlobalReduction, args: Any, kwargs: Any) -> Any:
        if self.takes_means:
            return reduction.__torch_function__(self._func, (), args, kwargs)
        return OwnDevice.__torch_function__(reduction, self._func, (), args, kwargs)

    def _cloned(self) -> Any:
        with torch.no_grad():
            return map_leaves(_clone, (self._args, self._kwargs))

    def _attempt(
        self, before: Any, denominators: Sequence[Tensor], wanted: Sequence[Tensor], adds_up: bool, for_all: bool
    ) -> list[Double] | None:
        """Returns what two workers would have as results, None where those are not what all rows give."""
        written = self._doubles[0].slices if self._mutates and self._doubles[0] is not None else ()
        copies = [one.clone() for one in written]
        results = []
        for which in (0, 1):
            reduction = GlobalReduction(self._device, denominators=denominators)
            try:
                with torch.no_grad():
                    args, kwargs = self._slice_of(before, which, adds_up, for_all)
                    refuse_states_of_others(self._name, args)
                    results.append(self._outcome(self._call(reduction, args, kwargs), args))
            except Exception:  # whatever the function raises for such slices: it does not work on them
                break
        found = self._compare(wanted, results)
        if found is None:
            for one, copy in zip(written, copies, strict=True):
                one.copy_(copy)
        return found

    def _compare(self, wanted: Sequence[Tensor], results: Sequence[Sequence[Tensor]]) -> list[Double] | None:
        """Returns the results of both slices with their placements; None if one is missing or has none."""
        if len(results) < 2 or any(len(one) != len(wanted) for one in results):
            return None
        found: list[Double] = []
        for leaf, first, second in zip(wanted, *results, strict=True):
            placement, shift = self._placement(leaf, first, second), 0
            if placement is None and self._shift and leaf.dtype in (torch.int32, torch.int64):
                placement, shift = self._placement(leaf, first, second + self._shift), self._shift
            if placement is None:
                return None
            found.append(Double(placement, (first, second), shift))
        return found

    def _slice_of(self, before: Any, which: int, adds_up: bool, for_all: bool) -> Any:
        positions, counts = itertools.count(), {count.position: count for count in self._follows}

        def prepare(leaf: Any) -> Any:
            position = next(positions)
            double = self._doubles[position]
            if double is not None:
                added = adds_up and double.placement == SHARE
                # In place, both slices write to the double itself once the function is known to work on them.
                return double.slices[0] + double.slices[1] if added else double.slices[which]
            if position in counts and not for_all:
                return counts[position].of(self._rows[which])
            return _clone(leaf) if self._mutates and isinstance(leaf, Tensor) else leaf

        return map_leaves(prepare, before)

    def _placement(self, full: Tensor, first: Tensor, second: Tensor) -> Placement:
        """Returns what the slices' results are of the one for all rows; None: nothing that is known."""
        if self._has_rows:
            rows = _find_rows(full, first, second, self._rows, self._tolerance)
            if rows is not None:
                return rows
        is_linear = self._name in LINEAR and bool(self._shares) and not self._has_rows
        sums = is_linear or (self._name in SUMS and not self._adds_to_more)
        sums = sums and full.shape == first.shape == second.shape and full.dtype != torch.bool
        return SHARE if sums and close(first + second, full, self._tolerance) else None

    def _draw(self) -> tuple[Step, Any, Sequence[Double | None]]:
        """Each worker draws for its own rows: what is drawn has the rows that the argument has."""
        double, given = self._doubles[0], self._leaves[0]
        result = self._func(*self._args, **self._kwargs)
        if double is None or not isinstance(double.placement, Rows) or result.shape != given.shape:
            raise Refused(f"what {self._name} draws depends on several rows")
        found = cut(result, double.placement, self._rows)
        if result is given:
            for written, part in zip(double.slices, found.slices, strict=True):
                written.copy_(part)
            found = double
        return Step(self._name, results=(double.placement,)), result, [found]

    def _draw_inside(self) -> tuple[Step, Any, Sequence[Double | None]]:
        """A function that draws and does something with it (`gumbel_softmax`): each worker draws for its own rows."""
        learned = None if self._mutates else self.decide_on_module()
        if learned is None:
            raise Refused(f"what {self._name} draws depends on several rows")
        step, found = learned
        return step, self._func(*self._args, **self._kwargs), found

    def _cuda(self) -> torch.device | None:
        return self._device if self._device.type == "cuda" else None

    def _states(self) -> list[Tensor]:
        """Returns the states of the streams."""
        states, device = [torch.get_rng_state()], self._cuda()
        return states if device is None else [*states, torch.cuda.get_rng_state(device)]

    def _normalise(self) -> tuple[Step, Any, Sequence[Double | None]]:
        """Batch normalisation has statistics of all workers' rows: what it gives has the rows that its input has."""
        result = self._call(GlobalReduction(self._device, record=True), self._args, self._kwargs)
        double = self._doubles[0]
        if double is None or not isinstance(double.placement, Rows) or double.placement.dim != 0:
            raise Refused("batch normalisation gets rows elsewhere than in dim 0")
        found = cut(result, double.placement, self._rows)
        return Step(self._name, results=(found.placement,)), result, [found]


def with_numbers(arguments: Any, follows: Sequence[RowCount], rows: int) -> Any:
    """Returns arguments with the numbers that follow the number of rows as they are for so many."""
    positions, counts = itertools.count(), {count.position: count for count in follows}

    def change(leaf: Any) -> Any:
        position = next(positions)
        return counts[position].of(rows) if position in counts else leaf

    return map_leaves(change, arguments)


def cut(tensor: Tensor, placement: Rows, rows: tuple[int, int]) -> Double:
    """Returns the double of a tensor with rows that is known as a whole only."""
    first, total = rows[0], sum(rows)
    with torch.no_grad():
        slices = [placement.narrow(tensor, total, *span).clone() for span in ((0, first), (first, total))]
    return Double(placement, (slices[0], slices[1]))


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _find_rows(full: Tensor, first: Tensor, second: Tensor, rows: tuple[int, int], tolerance: float) -> Rows | None:
    """Returns where the rows are in a result, if slices of the rows give slices of it."""
    total = sum(rows)
    if not full.ndim == first.ndim == second.ndim or full.layout is not torch.strided:
        return None
    for dim in range(full.ndim):
        each, rest = divmod(full.shape[dim], total)
        others = [size for place, size in enumerate(full.shape) if place != dim]
        if rest or not each:
            continue
        if any(
            part.shape[dim] != each * count or [size for place, size in enumerate(part.shape) if place != dim] != others
            for part, count in zip((first, second), rows, strict=True)
        ):
            continue
        for groups in range(1, each + 1):
            if each % groups == 0:
                placement = Rows(dim, groups)
                parts = [placement.split(part, count) for part, count in zip((first, second), rows, strict=True)]
                if close(torch.cat(parts, dim + 1), placement.split(full, total), tolerance):
                    return placement
    return None
