"""A few rows of a batch run together and one by one (or some by some), and what became of each run.

Decides how the runs are compared. Must not know what follows from it ([Note: method] in `split_check.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.execution import Execution
from moreh_ap.parallelizer.call.forward import EagerForward
from moreh_ap.parallelizer.call.parameter_writes import WrittenParameters
from moreh_ap.parallelizer.call.pipelined_forward import PipelinedPass
from moreh_ap.parallelizer.data.fsdp import BlockTrace, record_block_order
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.pipeline.stages import stages_of
from moreh_ap.parallelizer.rng.policy import Draws, RandomPolicy
from moreh_ap.parallelizer.rng.shared_draws import Share
from moreh_ap.parallelizer.rng.turns import KnownTurns
from moreh_ap.parallelizer.row_dims.common_decisions import BesideOthers
from moreh_ap.parallelizer.row_dims.equal_rows import true_masks
from moreh_ap.parallelizer.row_dims.placed_rows import RowsAlong
from moreh_ap.parallelizer.row_dims.read_numbers import READS_NUMBERS, ReadNumbers, do_hooks_meet_rows, why_rows_meet
from moreh_ap.parallelizer.row_dims.row_steps import Step
from moreh_ap.parallelizer.state.host_activations import saved_on_host
from moreh_ap.parallelizer.surroundings.placement import OwnDevice
from moreh_ap.parallelizer.trial.agreement import all_workers_or_none, together_or_not
from moreh_ap.parallelizer.trial.dry_run import LeftByForward, NoDropout, PaddedAlike, Refused, may_pad, state_restored
from moreh_ap.parallelizer.trial.row_comparison import (
    check_block_order,
    check_denominators,
    check_gradients,
    choose_rows,
    close,
    gradients_of_part,
    is_unknown,
    kind_of,
    means_beside_rows,
    names_of,
    random_weight,
    repeats,
    take_gradients,
    tolerance_of,
    went_back,
    without_meaning,
)
from moreh_ap.protocol.batch import are_numbers, row_dims, select_rows_along
from moreh_ap.protocol.pytree import nest_alike

Result = tuple[Any, Sequence[Any]]
"""How a result nests, and its leaves."""


class Probe:
    """The common run and the single runs of a few rows.

    Args:
        call: What is run, in mode "unsplit".
        args: Positional arguments with the whole batch.
        kwargs: Keyword arguments, likewise.
        rows: Rows of the batch.
        dims: Where each leaf of the arguments has rows; None: along dim 0.
        each: How many rows run apart at once: more than one where the forward cannot run on one row.

    Attributes:
        kinds: The kind of every leaf of the result, once outputs were compared. See `split_check.py`.
        draws: What is drawn from common streams, once draws were compared.
        draws_told: Whether they were, and it can be told which numbers belong to which row.
        saw, constant_places: See `GlobalReduction`.
        beside_rows: Call sites whose means over dim 0 count as much in one row as in several.
        takes_means: Whether the forward takes means over the batch.
        written, added: The parameters that the forward changes, and what it adds to the model's modules.
        may_write: Whether the forward may change parameters, since a step runs it once.
        may_take_turns: Whether workers may take turns in drawing for rows, since none is cut into micro-batches.
        steps: What each function in the forward does with rows, where that was learned. See `gathering_probe.py`.
        places: Where results have rows that are to be gathered, by number. See `placed_probe.py`.
        turned: Whether arguments have rows elsewhere than along dim 0.
        beside: Decisions for all rows that rows alone find as if beside others. See `common_decisions.py`.
        marks_all: Whether masks that the forward makes are true everywhere. See `equal_rows.py`.
        numbers: Which leaves of the arguments are a few numbers, of no row.
        chosen: The rows that run.
        noted: What was noted of all of them, and of some each time, once outputs were compared.
        repeats, has_graph: See `RandomPolicy.find_draws`; whether draws are found by forwards with gradients.
    """

    is_joined, _gathers, in_order, _least_each = False, False, True, 1
    steps: tuple[Step, ...] = ()
    turned = repeats = has_graph = marks_all = False
    beside: frozenset[int] = frozenset()
    _noise = 1e-2
    """Gradients may differ by this part of the tolerance times the largest gradient (2e-7 in float32).

    The bias of an attention key has a gradient of zero but for rounding: relative to itself it is never equal.
    """

    def __init__(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: int,
        dims: Sequence[int | None] | None = None,
        each: int = 1,
    ) -> None:
        self.kinds, self.places = tuple[str, ...](), dict[int, RowsAlong]()
        self.attributes: Mapping[str, int] = {}
        self.draws = Draws()
        self.has_unknown = self.takes_means = self._writes_nothing = self.draws_told = False
        self._load_shapes: dict[int, set[torch.Size]] = {}
        self.saw, self.constant_places = set[str](), set[int]()
        self.call, self.rows = call, rows
        self._leaves, self._spec = tree_flatten((tuple(args), dict(kwargs)))
        self.dims = row_dims(self._leaves, rows) if dims is None else dims
        each_leaf = enumerate(zip(self._leaves, self.dims, strict=True))
        self.numbers = [at for at, (leaf, dim) in each_leaf if dim is None and are_numbers(leaf)]
        self.each = max(each, self._least_each)
        self._ran: Sequence[int] = ()
        self._drew = RandomPolicy()
        self.chosen = self._choose_rows()
        self._tolerance = tolerance_of(call)
        self.written, self.added = tuple[str, ...](), tuple[str, ...]()
        self.may_take_turns = self.may_write = self._has_backward = True
        self.beside_rows, self._turns = frozenset[int](), KnownTurns()
        self._state, self._buffers, self._changed_buffers = (dict[str, Tensor]() for _ in range(3))
        self._ways, self.noted = list[BlockTrace](), list[ReadNumbers]()
        self._singles: list[EagerForward | PipelinedPass] = []
        self._left: WeakKeyDictionary[EagerForward | PipelinedPass, LeftByForward] = WeakKeyDictionary()
        self._weights, self._wanted = list[Tensor | None](), dict[str, Tensor | None]()

    def _arguments(self, chosen: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with the chosen rows, which are about to run."""
        self._ran = chosen
        args, kwargs = tree_unflatten(select_rows_along(self._leaves, self.dims, chosen), self._spec)
        return args, kwargs

    def run_again(self) -> None:
        """Runs the rows that ran last as on one device: with random numbers from where that run began, and without what
        a trial puts around. A collective: if one worker lacks what the forward reads, none begins a backward."""
        (args, kwargs), call = self._arguments(self._ran), replace(self.call, random=self._drew)
        with self._from_the_same_state():
            run = partial(EagerForward, call, args, kwargs, reduction=OwnDevice(call.device))
            done = together_or_not(run, call, is_alone=True)
            if call.grad:
                done.accumulate([random_weight(leaf) for leaf in done.outputs])
                take_gradients(self.call.module)

    def _exceeds_own_rows(self) -> bool:
        """Says whether a device would hold more rows than it trains with. See `host_activations.py`."""
        axis, device = self.call.axis, self.call.device
        return self.call.grad and device.type == "cuda" and len(self.chosen) * axis.size > self.rows

    def _choose_rows(self) -> list[int]:
        if self.each > 1:  # rows that belong together are usually neighbours
            return list(range(2 * self.each))
        return choose_rows(self._leaves, self.rows, may_pad=may_pad(self.call.module))

    def _policy(self, chosen: Sequence[int]) -> RandomPolicy:
        """Returns which random numbers a call of the chosen rows draws."""
        first = self.chosen.index(chosen[0])
        share = Share(first, first + len(chosen), len(self.chosen))
        return self.call.random.shared(0, share, self.draws, self._turns)

    def _beside_others(self, chosen: Sequence[int]) -> AbstractContextManager[Any]:
        return nullcontext() if chosen is self.chosen or not self.beside else BesideOthers(self.beside)

    def _surroundings(self) -> AbstractContextManager[Any]:
        """Returns what is active around a run: nothing is dropped where workers would drop something else."""
        return nullcontext() if self.draws.stream and self.call.random.covers(self.call.device) else NoDropout()

    def compare_draws(self) -> None:
        """Runs one row, and two if that drew anything, and finds which dims of what they draw have the rows.

        Raises:
            UnsharedDraw: They do not tell.
        """
        call = replace(self.call, grad=self.has_graph)
        lengths: Sequence[Tensor] = ()
        rules = replace(call.rules, counts=False, beside_rows=frozenset())

        def forward(random: RandomPolicy, num_rows: int, first: int = 0) -> None:
            nonlocal lengths
            args, kwargs = self._arguments(self.chosen[first : first + num_rows])
            self._drew = random
            recorder = PaddedAlike(call.device, rules=rules, lengths=lengths)
            recorder.load_shapes = self._load_shapes
            try:
                with self._from_the_same_state():
                    EagerForward(replace(call, random=random), args, kwargs, reduction=recorder)
            finally:  # one row may have one value a channel, which batch normalisation refuses
                self.saw |= recorder.saw
            lengths = lengths or recorder.global_denominators

        if rules.extremes or rules.loads or (rules.lengths and may_pad(call.module)):
            forward(RandomPolicy(), len(self.chosen))
        ways = {"in_turn": self.may_take_turns, "may_permute": self._gathers, "repeat": self.repeats}
        self.draws = call.random.find_draws(call.device, forward, self.each, **ways)
        self.draws_told = True

    @property
    def loads(self) -> frozenset[int]:
        """Call sites that may count how many rows go to each expert, where experts draw, or draws are not known."""
        if self.draws_told and not self.draws.are_for_routed:
            return frozenset()
        return frozenset(place for place, shapes in self._load_shapes.items() if len(shapes) == 1)

    def compare_outputs(self) -> None:
        """Runs the rows together and one by one, and finds the kinds.

        Raises:
            Refused: The results do not add up.
        """
        recorder = GlobalReduction(self.call.device, record=True, rules=self.call.rules)
        try:
            common = self._run(self.chosen, recorder)
        finally:
            self.saw |= recorder.saw
        denominators, self._places = recorder.global_denominators, recorder.mean_places
        self.constant_places = recorder.constant_places
        self.takes_means = bool(denominators)
        if self.call.grad:  # at once: the activations of the common run need not live beside those of the single ones
            self._weights = [random_weight(leaf) for leaf in common.outputs]
            self._has_backward = went_back(partial(self._go_back, common, self._weights))
            self._wanted = take_gradients(self.call.module)
        self._find_rounding(common)
        singles, counted = self._run_apart(denominators)
        self._check_ways()
        self._check_denominators(recorder.local_denominators, counted)
        self.attributes = common.attributes
        if common.gathered and not self._repeats(common):
            raise Refused(f"attribute {common.gathered[0]} gathers what it sees of the rows")
        self.has_unknown = common.runs_in_stages and any(map(is_unknown, common.outputs))
        if not all(nest_alike(treespec, common.treespec) for treespec, _ in singles):
            raise Refused("the result of one row nests differently from that of several")
        self.kinds = tuple(
            self._kind(index, name, leaf, [outputs[index] for _, outputs in singles])
            for index, (name, leaf) in enumerate(zip(names_of(common), common.outputs, strict=True))
        )
        if what := without_meaning(common):
            raise Refused(f"{what}, which shows nothing about more of them")

    def _repeats(self, common: Execution) -> bool:
        call = replace(self.call, grad=False, random=self._policy(self.chosen))
        with self._from_the_same_state(), self._surroundings():
            return repeats(lambda: EagerForward(call, *self._arguments(self.chosen)), common, self._tolerance)

    def _kind(self, index: int, name: str, leaf: Any, singles: Sequence[Any]) -> str:
        """Returns the kind of a leaf of the result, given the same leaf of the single runs."""
        return kind_of(name, leaf, singles, self._tolerance_of(index), self._tolerance)

    def _find_rounding(self, common: EagerForward | PipelinedPass) -> None:
        """Finds out how much rounding there is in what rows computed apart give, where that is not known."""

    def _tolerance_of(self, output: int) -> float:
        """Returns the largest difference of an output that rounding explains, relative to its largest entry."""
        return self._tolerance

    def _is_same_buffer(self, name: str, value: Tensor) -> bool:
        """Says whether a buffer became what it became in the common run, but for rounding."""
        return close(value, self._buffers[name], self._tolerance)

    def _is_rounding(self, name: str, got: Tensor, want: Tensor, noise: float) -> bool:
        """Says whether rounding explains the difference of two gradients of a parameter; `noise` is none anywhere."""
        return close(got, want, 10 * self._tolerance, noise)

    def _run_apart(self, denominators: Sequence[Tensor]) -> tuple[list[Result], list[Sequence[Tensor]]]:
        """Runs the rows one by one; returns the result of each run, and what it counted for each mean."""
        counted: list[Sequence[Tensor]] = []
        for first in range(0, len(self.chosen), self.each):
            reduction = GlobalReduction(self.call.device, denominators=denominators, rules=self.call.rules)
            try:
                self._singles.append(self._run(self.chosen[first : first + self.each], reduction))
            finally:  # statistics of the rows end the run, and are tried otherwise
                self.beside_rows = means_beside_rows(self._places, denominators, reduction.local_denominators)
            counted.append(reduction.local_denominators)
        return [(single.treespec, single.outputs) for single in self._singles], counted

    def _check_denominators(self, common: Sequence[Tensor], apart: Sequence[Sequence[Tensor]]) -> None:
        check_denominators(common, apart)

    @all_workers_or_none
    def _go_back(self, run: EagerForward | PipelinedPass, gradients: Sequence[Tensor | None]) -> None:
        """Runs a backward that leaves the gradients of parameters on each worker."""
        with self._left[run].there():
            run.accumulate(gradients)

    def _backward_apart(self) -> None:
        """Runs the backward of the single runs."""
        for position, single in enumerate(self._singles):
            self._go_back(single, self._share_of(position, len(self._singles)))

    def _share_of(self, position: int, number: int) -> list[Tensor | None]:
        return gradients_of_part(self.kinds, self._weights, position, number)

    def compare_gradients(self) -> None:
        """Runs backward of the single runs, and compares what some parameters got with the common run.

        Raises:
            Refused: The gradients do not add up.
        """
        if self._has_backward:
            self._backward_apart()
        if do_hooks_meet_rows(self.noted):
            raise Refused(READS_NUMBERS)
        got_by_name = take_gradients(self.call.module)
        wanted = [grad.abs().max() for grad in self._wanted.values() if grad is not None and grad.numel()]
        noise = self._noise * self._tolerance * float(max(wanted, default=0.0))
        check_gradients(self._wanted, got_by_name, partial(self._is_rounding, noise=noise))

    @contextmanager
    def _from_the_same_state(self) -> Iterator[Callable[[], LeftByForward]]:
        """Puts buffers, attributes and parameters back after the block; what it is given returns what they became.

        Raises:
            Refused: The forward changes a part of a parameter, or one in each micro-batch, or it adds members.
        """
        module = self.call.module
        writes = None if self._writes_nothing else WrittenParameters(module)
        with state_restored(module) as state, writes or nullcontext():
            yield state.left
            self.added = state.members.added()
        if self.added:
            raise Refused(f"the forward adds {self.added[0]}")
        self._writes_nothing = writes is None or not writes.names
        self._state = {} if writes is None else writes.state
        if writes is not None and writes.names:
            self.written = tuple(dict.fromkeys([*self.written, *writes.names]))
            divided = next((name for name in writes.names if name not in writes.state or not self.may_write), None)
            if divided is not None:
                raise Refused(f"the forward changes parameter {divided}")

    @all_workers_or_none
    def _run(
        self,
        chosen: Sequence[int],
        reduction: GlobalReduction | None,
        change: Callable[[Any], Any] | None = None,
        **changes: Any,
    ) -> EagerForward | PipelinedPass:
        """Runs the chosen rows, from the same buffers every time, as a call with some `changes`.

        Args:
            chosen: The rows.
            reduction: What to do with means.
            change: Makes each leaf of the arguments a little different: nothing is found out about such a run.
            changes: What of the call is different.

        Raises:
            Refused: A buffer becomes something else than in the first run: it gathers what it saw of the rows.
        """
        args, kwargs = self._arguments(chosen)
        if change is not None:
            args, kwargs = tree_map(change, (args, kwargs))
        call = replace(self.call, random=self._policy(chosen), **changes)
        self._drew, leaves = call.random.for_probe(), tree_leaves((args, kwargs))
        reading = ReadNumbers(self.saw, [leaves[at] for at in self.numbers], call.module)
        with self._from_the_same_state() as left:
            beside, trace = self._beside_others(chosen), record_block_order(call.module)
            masks = true_masks() if self.marks_all else nullcontext()
            with self._surroundings(), reading as noted, beside, masks, trace as way:
                runs_in_stages = call.grad and stages_of(call.module) is not None
                run = PipelinedPass if runs_in_stages else EagerForward
                with saved_on_host() if self._exceeds_own_rows() else nullcontext():
                    done = run(call, args, kwargs, reduction=reduction)
            after = {name: t.detach().clone() for name, t in call.module.named_buffers() if name not in done.attributes}
            own = len(done.outputs) - sum(done.attributes.values())
            # An attribute that was changed in place is put back with the rest of the state: what it became is kept.
            set_by_forward = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in done.outputs[own:]]
            done.outputs = [*done.outputs[:own], *set_by_forward]
            self._left[done] = left()
        if change is not None:
            self._changed_buffers = after
            return done
        after.update(self._state)
        self._ways.append(way)
        self.noted.append(noted)
        self._buffers = self._buffers or after
        for name, value in after.items():
            if name not in self._buffers or not self._is_same_buffer(name, value):
                raise Refused(f"{name} gathers what it sees of the rows")
        return done

    def _check_ways(self) -> None:
        """Compares how the runs went, the common one first.

        Raises:
            Refused: The rows decide in which order, and how many, come to what FSDP2 gathers, or which of them count.
        """
        if not (self._gathers or self.beside) and (reason := why_rows_meet(self.noted[0], self.noted[1:])):
            raise Refused(reason)
        check_block_order(self._ways)
