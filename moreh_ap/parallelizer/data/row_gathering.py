"""A forward on a batch slice that gathers rows where, and only where, they meet: differentiably.

Decides what each call of a torch function does with tensors that hold a slice of the batch, as learned beforehand. Must
not know how that is learned (`trial.lockstep`), models or plans.

[Note: placements]
Inside such a forward each tensor is one of three. It has this worker's rows along one dim (`Rows`); or it is a summand
whose sum over the workers is one device's tensor (`SHARE`); or it is one device's tensor, on every worker. A function
whose arguments have rows either works row by row, and its result has rows too, or it gets the rows of all workers and
its result is one device's. Summands are added up before they are used for anything but sums.

[Note: gradients]
The copies of one device's tensor on W workers are W tensors, each of which goes into the share of the loss that its
worker computes. So the gradient of rows that were gathered is the sum of what the workers found for them, and that of
a summand is the sum of the gradients of all copies of the total. A loss that every worker computes counts 1/W on each.

[Note: dealt modules]
Where a product deals rows to places of experts (`torch.einsum`), each worker has summands of what experts get. Once
these are added up, every worker would compute all places. A module that works place by place computes a part of them on
each worker instead, and the results are gathered: each place counts once in the gradients of its parameters.

[Note: the rest]
Some forwards do with rows what steps do not tell: go through them in Python, keep a part of them, divide by what is not
a multiple of their number (`n**2 - n`). What comes before, up to a module with parameters, has steps; the rest runs on
the rows of all workers, on each of them. A tensor that has this worker's rows is gathered when it is first used there,
and tells how many rows there are on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from moreh_ap.errors import ExactnessError
from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.loss.loss_reduction import call_site
from moreh_ap.parallelizer.loss.mean_rules import LENGTHS, MeanRules
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.observation.call_sites import GATHERING, is_called_by, site_of_call
from moreh_ap.parallelizer.observation.filled_arguments import FilledArguments
from moreh_ap.parallelizer.observation.module_calls import Original, module_step, seeing_modules
from moreh_ap.parallelizer.observation.torch_calls import (
    asks_for_sizes,
    function_name,
    is_question,
    leaves_of,
    map_leaves,
    tensors_of,
)
from moreh_ap.parallelizer.rng.refused_draws import RefusedDraws
from moreh_ap.parallelizer.rng.shared_draws import MAY_DRAW
from moreh_ap.parallelizer.row_dims.dealt_modules import dealt_tensor, with_part
from moreh_ap.parallelizer.row_dims.placements import Placements
from moreh_ap.parallelizer.row_dims.row_numbers import (
    RowFloat,
    RowNumber,
    everyone_s,
    lengths_of_both,
    math_of_both,
    own_of,
    row_sizes,
)
from moreh_ap.parallelizer.row_dims.row_steps import REST, SHARE, Gathering, Placement, Rows, Step
from moreh_ap.parallelizer.statistics.batch_statistics import JoinedReduction, SumOverWorkers, all_gather
from moreh_ap.parallelizer.surroundings.placement import OwnDevice
from moreh_ap.protocol.batch import row_range


class GatheringReduction(JoinedReduction):
    """A `JoinedReduction` that also gathers rows where they meet.

    Args:
        device, axis, rules, mark, meets_failed: See `GlobalReduction`.
        gathering: What was learned of the forward.

    Attributes:
        learned_kinds: The kinds of the tensors in the result, in order, once `finish` was called.

    Raises:
        Diverged: At a function that others than the learned one precede, or at which other workers are not.
    """

    learned_kinds: list[str]

    def __init__(
        self,
        device: torch.device,
        *,
        axis: Axis,
        gathering: Gathering,
        rules: MeanRules = LENGTHS,
        mark: Callable[[], int] | None = None,
        meets_failed: bool = False,
    ) -> None:
        super().__init__(
            device, axis=axis, rules=replace(rules, loads=frozenset()), mark=mark, meets_failed=meets_failed
        )
        self._rules, self._rules_inside = self.rules, rules  # functions that are steps have placements instead
        self._gathering = gathering
        self._placements = Placements()
        self._position = 0
        self._by_place = {} if gathering.in_order else {step.place: step for step in gathering.steps}
        self._inside: bool | None = None
        """In a module that works row by row, whether its means over dim 0 are means over the batch."""
        self._start, self._stop = row_range(axis.rank, axis.size, gathering.rows)
        self._of_all_rows = Placements()
        """What tensors of the rest are on one device, by what they are here."""

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, spec = tree_flatten((args, kwargs))
        for position, dim in enumerate(self._gathering.dims):
            if dim is not None:
                if self._gathering.cuts:  # differentiably: its gradient is zero for the rows of others
                    given[position] = Rows(dim).narrow(given[position], self._gathering.rows, self._start, self._stop)
                self._placements[given[position]] = Rows(dim)
        return tree_unflatten(given, spec)  # type: ignore[no-any-return]

    def finish(self, result: Any, settled: Callable[[Any], Any]) -> Any:
        """Gathers tensors whose rows lie along another dim than 0, which only this reduction knows of. Gathers all
        where the rest of the forward may have returned the rows of all workers, whichever way it went."""
        self._inside = False  # what is called now is no step of the forward
        self.learned_kinds, has_rest = [], self._gathering.steps[-1].name == REST

        def whole_unless_first(leaf: Tensor) -> Tensor:
            placement = self._placements.get(leaf)
            is_first = placement == Rows(0) and not self._gathering.cuts
            if has_rest and placement is not None:
                self.learned_kinds.append("same")
                self._placements[kept := settled(leaf)] = placement
                return self._whole(kept)
            self.learned_kinds.append("rows" if is_first else SHARE if placement == SHARE else "same")
            return leaf if is_first or not isinstance(placement, Rows) else self._gathered(settled(leaf), placement)

        return tree_map_only(Tensor, whole_unless_first, result)

    def to_replay(self) -> Callable[[slice], OwnDevice]:
        if self._inside is None:
            raise ExactnessError(
                "rows meet in a block whose activations are computed again in the backward",
                "plans without recompute for this model",
                'plan="recompute=none"',
            )
        return self.replay if self._inside else lambda sites: OwnDevice(self.device)

    def __enter__(self) -> GatheringReduction:
        self._around = ExitStack()
        self._around.enter_context(seeing_modules(self._call_module))
        self._around.enter_context(lengths_of_both())
        if self._gathering.steps[-1].name == REST:
            self._around.enter_context(math_of_both())
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self._around.__exit__(exc_type, exc_value, traceback)
        super().__exit__(exc_type, exc_value, traceback)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside is not None:
            return self._run(self._inside, func, args, kwargs)
        if self._is_in_rest():
            return self._run_rest(func, args, kwargs)
        if is_question(func):
            return self._asked(func, args, kwargs)
        given = [self._placements.get(leaf) for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(given) and is_called_by(GATHERING):
            return OwnDevice.__torch_function__(self, func, types, args, kwargs)
        step = self._next(function_name(func), args, kwargs)
        args, kwargs, placements = self._prepare(step, args, kwargs)
        return self._placed(step, self._run(has_first_rows(placements), func, args, kwargs))

    def _asked(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what a tensor is asked for; a size with rows knows that of the whole batch."""
        answer = func(*args, **kwargs)
        placement = self._placements.get(args[0]) if asks_for_sizes(func) else None
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(placement, Rows) or dim not in (None, placement.dim, placement.dim - args[0].ndim):
            return answer
        own, everyone = self._stop - self._start, self._gathering.rows
        return row_sizes(answer, placement.dim, lambda number: number // own * everyone)

    def _run(self, takes_means: bool, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function. Means over dim 0 of what has its rows elsewhere, or is one device's, are not over rows."""
        if takes_means:
            return super().__torch_function__(func, (), args, kwargs)
        return OwnDevice.__torch_function__(self, func, (), args, kwargs)

    def _is_in_rest(self) -> bool:
        steps = self._gathering.steps
        return self._gathering.in_order and self._position < len(steps) and steps[self._position].name == REST

    def _run_rest(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function of the rest of the forward, on the rows of all workers. See [Note: the rest]."""
        if is_question(func):
            placement = self._placements.get(args[0]) if asks_for_sizes(func, counts=True) else None
            if isinstance(placement, Rows):
                sizes = list(args[0].shape)
                sizes[placement.dim] = sizes[placement.dim] // (self._stop - self._start) * self._gathering.rows
                return func(torch.empty(sizes, device="meta"), *args[1:], **kwargs)
            return func(*args, **kwargs)
        if function_name(func) in MAY_DRAW:
            with RefusedDraws():
                return OwnDevice.__torch_function__(self, func, (), *map_leaves(self._whole, (args, kwargs)))
        return OwnDevice.__torch_function__(self, func, (), *map_leaves(self._whole, (args, kwargs)))

    def _whole(self, leaf: Any) -> Any:
        """Returns an argument as one device has it."""
        placement = self._placements.get(leaf) if isinstance(leaf, Tensor) else None
        if placement is None:
            return everyone_s(leaf) if isinstance(leaf, (RowNumber, RowFloat)) else leaf
        whole = self._of_all_rows.get(leaf)
        if whole is None:
            with torch.enable_grad():  # a later use may want the gradient
                if placement == SHARE:
                    self._meet_here()
                    whole = SumOverWorkers.apply(leaf, self.axis)
                else:
                    whole = self._gathered(leaf, placement)
            self._of_all_rows[leaf] = whole
        return whole

    def _call_module(self, call: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside is not None or self._is_in_rest():
            return call(*args, **kwargs)
        step = self._next(module_step(module), args, kwargs)
        if step.enters:
            return call(*args, **kwargs)
        self._inside, given = False, (args, kwargs)  # what is called now is no step of the forward
        try:
            args, kwargs, placements = self._prepare(step, args, kwargs)
            filled = FilledArguments(given, (args, kwargs))
            if step.deals is None:
                self._inside, self.rules = has_first_rows(placements), self._rules_inside
                result = call(*args, **kwargs)
            else:
                result = self._deal(step.deals, call, (args, kwargs))
        finally:
            self._inside, self.rules = None, self._rules
        placed = self._placed(step, result)
        become = dict(zip(map(id, tensors_of(result)), tensors_of(placed), strict=True))
        filled.hand_on(lambda leaf: become.get(id(leaf), leaf))
        return placed

    def _deal(self, along: Rows, call: Original, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        """Returns the result of a module of which each worker computes a part. See `dealt_modules.py`."""
        given, workers = dealt_tensor(leaves_of(arguments)), self.axis.size
        if given is None or len(given) < workers:
            return call(*arguments[0], **arguments[1])  # type: ignore[no-any-return]
        start, stop = row_range(self.axis.rank, workers, len(given))
        args, kwargs = with_part(given, start, stop, arguments)
        own = along.split(call(*args, **kwargs), stop - start)
        self._meet_here()
        return along.merge(GatherRows.apply(own, along.dim + 1, len(given), self.axis))

    def _next(self, name: str, args: Any, kwargs: Any) -> Step:
        """Returns the step of the function or module that is being called."""
        steps, found = self._gathering.steps, None
        if self._by_place:
            leaves = leaves_of((args, kwargs))
            given = tuple(self._placements.get(leaf) for leaf in leaves if isinstance(leaf, Tensor))
            found = self._by_place.get(Step(name, site=site_of_call(), given=given).place)
        elif self._position < len(steps) and steps[self._position].name == name:
            found = steps[self._position]
            self._position += 1
        if found is None:
            raise Diverged("the forward calls other functions than when it was tried on a few rows")
        return found

    def _prepare(self, step: Step, args: Any, kwargs: Any) -> tuple[Any, Any, list[Placement]]:
        """Returns the arguments as the step wants them, and the placements of the tensors among them."""
        counts = {count.position: count for count in step.follows}
        positions = itertools.count()
        own, everyone = self._stop - self._start, self._gathering.rows
        placements: list[Placement] = []

        def prepare(leaf: Any) -> Any:
            position = next(positions)
            if isinstance(leaf, Tensor):
                placement = self._placements.get(leaf)
                if placement == SHARE and step.adds_up:
                    self._meet_here()
                    total = SumOverWorkers.apply(leaf, self.axis)
                    return leaf.copy_(total) if step.writes and position == 0 else total
                if isinstance(placement, Rows) and step.gathers:
                    return self._gathered(leaf, placement)
                placements.append(placement)
            elif position in counts:
                if counts[position].is_of_one_size:
                    return leaf.everyone if isinstance(leaf, (RowNumber, RowFloat)) else counts[position].added
                # A number may come from a tensor that has this worker's rows, or from one that has all.
                if isinstance(leaf, (RowNumber, RowFloat)):
                    return leaf.everyone if step.for_all else own_of(leaf)
                if leaf not in (counts[position].of(own), counts[position].of(everyone)):
                    raise Diverged(f"{step.name} gets other numbers than when it was tried on a few rows")
                return counts[position].of(everyone if step.for_all else own)
            return leaf

        return *map_leaves(prepare, (args, kwargs)), placements

    def _placed(self, step: Step, result: Any) -> Any:
        placements = iter(step.results)

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            placement = next(placements, None)
            if step.cuts and isinstance(placement, Rows):
                if leaf.shape[placement.dim] % (placement.groups * self._gathering.rows):
                    raise Diverged(f"{step.name} gives another number of rows than when it was tried on a few")
                leaf = placement.narrow(leaf, self._gathering.rows, self._start, self._stop)
            if placement is not None:
                self._placements[leaf] = placement
            elif self._placements.get(leaf) is not None:
                self._placements.forget(leaf)
            return leaf

        if step.cuts:
            return map_leaves(place, result)
        map_leaves(place, result)
        return result

    def _meet_here(self) -> None:
        """Makes sure that all workers are at this function; reading that makes the device wait."""
        self._exchange(torch.zeros((), dtype=torch.float64), call_site(), 0)
        if self._apart[-1].any():
            raise Diverged("rows decide which functions the forward calls")

    def _gathered(self, tensor: Tensor, placement: Rows) -> Tensor:
        self._meet_here()
        own = placement.split(tensor, self._stop - self._start)
        return placement.merge(GatherRows.apply(own, placement.dim + 1, self._gathering.rows, self.axis))


def has_first_rows(placements: Sequence[Placement]) -> bool:
    """Says whether means over dim 0 are means over the batch: arguments have rows, and none elsewhere."""
    dims = {placement.dim for placement in placements if isinstance(placement, Rows)}
    return dims == {0}


class GatherRows(torch.autograd.Function):
    """The rows of all workers, on each of them, along `dim`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, rows: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.rows, ctx.axis = dim, rows, axis
        counts = list(_counts(rows, axis))
        rows_first = own.detach().movedim(dim, 0)
        padded = rows_first.new_zeros(max(counts), *rows_first.shape[1:])
        padded[: len(rows_first)] = rows_first
        carrier = padded.to(torch.uint8) if padded.dtype is torch.bool else padded
        everything = carrier.new_empty(axis.size * len(padded), *padded.shape[1:])
        all_gather(everything, carrier, group=axis.group)
        pieces = everything.unflatten(0, (axis.size, len(padded)))
        gathered = torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])
        return gathered.to(own.dtype).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        start, stop = row_range(ctx.axis.rank, ctx.axis.size, ctx.rows)
        total = SumOverWorkers.apply(grad.contiguous(), ctx.axis)
        return total.narrow(ctx.dim, start, stop - start), None, None, None


def _counts(rows: int, axis: Axis) -> Iterator[int]:
    for rank in range(axis.size):
        start, stop = row_range(rank, axis.size, rows)
        yield stop - start
