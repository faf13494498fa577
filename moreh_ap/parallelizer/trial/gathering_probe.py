"""A few rows of a batch run together, and shared among the workers, who gather them where they meet.

Decides how that is tried where a forward compares rows with each other: contrastive losses, balanced experts,
statistics that a model takes itself. Must not know what follows from it (`split_check.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.forward import EagerForward
from moreh_ap.parallelizer.data.row_gathering import GatheringReduction
from moreh_ap.parallelizer.observation.module_calls import OF_MODULES
from moreh_ap.parallelizer.observation.recorded_calls import Called, NumberRecorder
from moreh_ap.parallelizer.rng.policy import NUM_OTHER_STREAMS, Drawing, RandomPolicy
from moreh_ap.parallelizer.rng.shared_draws import have_several
from moreh_ap.parallelizer.row_dims.own_entries import OwnEntries
from moreh_ap.parallelizer.row_dims.row_numbers import RowCount
from moreh_ap.parallelizer.row_dims.row_steps import REST, SHARE, Gathering, Step, in_any_order
from moreh_ap.parallelizer.surroundings.placement import OwnDevice
from moreh_ap.parallelizer.trial.agreement import everywhere
from moreh_ap.parallelizer.trial.dry_run import NoDropout, Refused, attempt
from moreh_ap.parallelizer.trial.hidden_terms import filled, own_zeros_of
from moreh_ap.parallelizer.trial.joined_probe import ALL_ROUNDING, ROUNDING, SMALLEST, JoinedProbe
from moreh_ap.parallelizer.trial.lockstep import KeptInside, Lockstep
from moreh_ap.parallelizer.trial.row_comparison import close
from moreh_ap.protocol.batch import row_range
from moreh_ap.protocol.rng_state import seeded_state_of_host


class GatheringProbe(JoinedProbe):
    """Learns where rows meet, then runs as `JoinedProbe` does."""

    _gathers, _least_rounding = True, 0.0
    _lockstep: Lockstep | None = None
    _few: tuple[Sequence[Called], Sequence[Called]] = (), ()

    @property
    def could_run(self) -> bool:
        """Whether the forward could run on a few of the rows."""
        return self._lockstep is not None

    def compare_outputs(self) -> None:
        self.steps = self._learn()
        super().compare_outputs()

    def compare_gradients(self) -> None:
        try:
            super().compare_gradients()
        except RuntimeError as error:
            if self._lockstep is None or not self._lockstep.meets_in_function:
                raise
            raise Refused("rows meet in a torch.autograd.Function, whose backward knows some of them") from error

    def _learn(self) -> tuple[Step, ...]:
        """Returns the steps of the forward, those of all ways if numbers of Python or NumPy decide which it takes.

        Raises:
            Refused: They do, and at one place in the model's code functions do different things with rows.
        """
        if self.steps:
            return self.steps
        host = self.call.random.host
        fewer, draws = self._record(host, self._first)
        seeds = range(NUM_OTHER_STREAMS) if draws else ()
        ways = [(other, self._record(other, self._first)[0]) for other in map(seeded_state_of_host, seeds)]
        others = [(other, calls) for other, calls in ways if _names(calls) != _names(fewer)]
        steps = self._steps_of(host, fewer)
        self.in_order = not others
        if self.in_order:
            return steps
        every_way = in_any_order(itertools.chain(steps, *itertools.starmap(self._steps_of, others)))
        if every_way is None:
            raise Refused("numbers of Python decide what functions do with rows, which depend on each other")
        return every_way

    def _record(
        self, host: bytes | None, chosen: Sequence[int], grad: bool = True, *, draws_others: bool = False
    ) -> tuple[Sequence[Called], bool]:
        """Returns what a forward of some rows calls if Python's and NumPy's streams start at `host`, and whether it
        draws from them; `draws_others`: with other random numbers of PyTorch."""
        recorder = NumberRecorder(self.call.device)
        drawing = self._forward(chosen, recorder, host, grad, draws_others)
        return recorder.calls, drawing.moved_host()

    def steps_of_batch(self) -> tuple[Step, ...] | None:
        """Returns the steps with the numbers that all rows of the batch have; None if these call other functions.

        A collective; it runs the forward on all rows of the batch, without gradients. A forward that asks whether there
        are any (``if x.requires_grad:``) may then call others; it runs once more with gradients, and nothing is kept
        for a backward.
        """
        if not self.in_order:
            return None if any(step.is_of_one_size for step in self.steps) else self.steps
        found = self._steps_of_all_rows(grad=False)
        if found is None and self.call.grad:
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: None, lambda nothing: nothing):
                found = self._steps_of_all_rows(grad=True)
        return found

    def _steps_of_all_rows(self, *, grad: bool) -> tuple[Step, ...] | None:
        calls: list[Sequence[Called]] = []

        def runs(rows: Sequence[int], **draws: bool) -> bool:
            run = partial(self._record, self.call.random.host, rows, grad=grad, **draws)
            return not attempt(lambda: calls.append(run()[0]), self.call.module)

        found = with_numbers_of(self.steps, calls[0], *self._few, self.rows) if runs(range(self.rows)) else None
        may_follow = found is not None and any(not count.multiple for step in found for count in step.follows)
        if not everywhere(not may_follow, self.call):  # do they follow the values of these rows? Others are as many
            every, last = range(self.rows), self.rows - 1
            pairs = [row - row % 2 for row in every], [min(row + 1 - row % 2, last) for row in every]
            did_run = [runs(rows, draws_others=True) for rows in pairs]
            found = with_numbers_of(self.steps, calls[0], *self._few, self.rows, calls[1:]) if all(did_run) else None
        return found if everywhere(found is not None, self.call) else None

    def _steps_of(self, host: bytes | None, fewer: Sequence[Called]) -> tuple[Step, ...]:
        """Returns the steps of one way: with others in place of zeros, if the forward goes the same way with them. What
        a gate of zero lets through would not show. See `hidden_terms.py`."""
        steps, zeros = self._learned(host, fewer), own_zeros_of(self.call.module)
        if everywhere(not zeros, self.call):
            return steps
        with filled(zeros):
            calls = list[Sequence[Called]]()
            failed = attempt(lambda: calls.append(self._record(host, self._first)[0]), self.call.module)
            goes_as_well = not failed and _names(calls[0]) == _names(fewer)
            return self._learned(host, calls[0]) if everywhere(goes_as_well, self.call) else steps

    def _learned(self, host: bytes | None, fewer: Sequence[Called]) -> tuple[Step, ...]:
        enters: list[nn.Module] = []
        while True:
            try:
                return self._learned_entering(host, fewer, enters)
            except KeptInside as kept:
                if kept.module in enters:
                    raise Refused("a module keeps tensors of its inside, and rows depend on each other") from kept
                enters.append(kept.module)

    def _learned_entering(
        self, host: bytes | None, fewer: Sequence[Called], enters: Sequence[nn.Module]
    ) -> tuple[Step, ...]:
        number, first = len(self.chosen), len(self._first)
        others, _ = self._record(host, self.chosen[-first:], draws_others=True)
        lockstep = Lockstep(
            self.call.device,
            rows=(first, number - first),
            dims=self.dims,
            fewer=(first, fewer),
            others=others,
            tolerance=self._tolerance,
            rules=self.call.rules,
            draws=self.draws.stream,
            enters=enters,
            entries=[entry for one in self.call.extensions if isinstance(one, OwnEntries) for entry in one.entries],
        )
        self._lockstep, self._few = lockstep, (fewer, others)
        self._forward(self.chosen, lockstep, host, self.call.grad)
        return tuple(lockstep.steps)

    def beginnings(self) -> Iterator[tuple[Step, ...]]:
        """Yields steps after which the rest of the forward may run on all rows, the longest first.

        They end behind a module with parameters, and at least half of all parameters are in modules before that.
        """
        if self._lockstep is None or not self.in_order or not self._lockstep.ends:
            return
        steps, ends = self._lockstep.steps, self._lockstep.ends
        alone = next((number for number, step in enumerate(steps) if step.meets), len(steps))
        total = sum(parameter.numel() for parameter in self.call.module.parameters())
        for last in dict.fromkeys([ends[-1][0], *[end for end, _ in ends if end <= alone][-1:]]):
            before = {one: one.numel() for end, module in ends if end <= last for one in module.parameters()}
            if 2 * sum(before.values()) >= total:
                yield tuple(steps[:last])

    @property
    def _first(self) -> list[int]:
        """The rows that the first of two workers has."""
        return self.chosen[: row_range(0, 2, len(self.chosen))[1]]

    def _forward(
        self, chosen: Sequence[int], mode: OwnDevice, host: bytes | None, grad: bool, draws_others: bool = False
    ) -> Drawing:
        """Runs some rows under a mode; returns what knows the random numbers that they drew."""
        args, kwargs = self._arguments(chosen)
        stream = self.call.random.stream
        if draws_others and stream is not None:
            stream = torch.Generator().manual_seed(0).get_state()
        call = replace(self.call, random=RandomPolicy(1 if draws_others else None, stream, host))
        with self._from_the_same_state(), NoDropout():
            run = EagerForward(replace(call, grad=grad and call.grad), args, kwargs, reduction=mode)
        return run.drawing

    def _reduction(self, mark: Callable[[], int] | None) -> GatheringReduction:
        gathering = Gathering(self.steps, tuple(self.dims), len(self.chosen), in_order=self.in_order)
        call = self.call
        return GatheringReduction(
            call.device, axis=call.axis, gathering=gathering, rules=call.rules, mark=mark, meets_failed=True
        )

    def _kind(self, index: int, name: str, leaf: Any, singles: Sequence[Any]) -> str:
        """Of a number that is zero but for rounding (the divergence of a policy from itself), the kind is what the
        functions that made it say: each was compared."""
        rounding = self._output_rounding[index]
        learned = self._used.learned_kinds if isinstance(self._used, GatheringReduction) else []
        tensors = [place for place, one in enumerate(self._singles[0].outputs) if isinstance(one, Tensor)]
        is_zero = rounding >= ALL_ROUNDING and isinstance(leaf, Tensor) and len(learned) == len(tensors)
        if not is_zero or learned[tensors.index(index)] == "rows" or any(one.shape != leaf.shape for one in singles):
            return super()._kind(index, name, leaf, singles)
        kind = learned[tensors.index(index)]
        whole = sum(singles[1:], start=singles[0]) if kind == SHARE else singles[0]
        largest = float(torch.linalg.vector_norm(leaf.float(), torch.inf))
        if not close(whole, leaf, 0.0, noise=ROUNDING * rounding * max(largest, SMALLEST)):
            raise Refused(f"{name} is not what its rows give one by one: rows depend on each other")
        return kind

    def _check_denominators(self, common: Sequence[Tensor], apart: Sequence[Sequence[Tensor]]) -> None:
        """Means of what every worker has are no sites on workers; the results are compared in any case."""


class InterleavedProbe(GatheringProbe):
    """As `GatheringProbe`, with rows of other halves of the batch beside each other: of sorted classes, a few rows
    that are neighbours have one."""

    def _choose_rows(self) -> list[int]:
        return interleaved(super()._choose_rows())


def interleaved(rows: Sequence[int]) -> list[int]:
    """Returns rows with each of the first half before one of the second."""
    half = -(-len(rows) // 2)
    pairs = itertools.zip_longest(rows[:half], rows[half:])
    return [row for pair in pairs for row in pair if row is not None]


def gathering_probes(
    call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int, each: int
) -> Iterator[GatheringProbe]:
    """Yields what to try where rows meet: each is to be compared before the next. Arguments as `Probe`'s.

    What is drawn for a row lies together, or else, where a row has several entries, apart: an encoder that gets two
    columns of a batch, one behind the other.
    """
    for kind in (GatheringProbe, InterleavedProbe):
        could_run = False
        for repeats in (False, True):
            first = kind(call, args, kwargs, rows, each=each)
            first.repeats = repeats
            yield first
            for steps in first.beginnings():
                probe = kind(call, args, kwargs, rows, each=each)
                probe.steps, probe._few, probe.repeats = (*steps, Step(REST)), first._few, repeats
                probe._lockstep = first._lockstep
                yield probe
            could_run = could_run or first.could_run
            if everywhere(not have_several(first.draws.stream), call):
                break
        if could_run:
            break


def _names(calls: Sequence[Called]) -> list[str]:
    return [called.name for called in calls]


def with_numbers_of(
    steps: Sequence[Step],
    calls: Sequence[Called],
    fewer: Sequence[Called],
    others: Sequence[Called],
    rows: int,
    alike: Sequence[Sequence[Called]] = (),
) -> tuple[Step, ...] | None:
    """Returns steps with the numbers of a whole batch, where these follow the number of rows in another way than its
    multiples do; None if the batch calls other functions than a few rows.

    Args:
        steps: What was learned of a few rows, in order.
        calls: What the batch calls.
        fewer: What fewer rows call.
        others: What as many other rows call.
        rows: Rows of the batch.
        alike: What batches of as many other rows call: numbers that differ there are no numbers of rows.
    """
    if any(_names(one) != _names(calls) for one in alike):
        return None
    if len(fewer) != len(others):  # values decide what the forward calls: no number is known to follow the rows so
        return tuple(steps)
    found: list[Step] = []
    position, position_of_fewer = 0, 0
    for step in steps:
        if step.name == REST:
            return (*found, step)
        if step.is_of_sharding:
            found.append(step)
            continue
        if position >= len(calls) or calls[position].name != step.name:
            return None
        called, before, again = calls[position], fewer[position_of_fewer], others[position_of_fewer].numbers
        many = [one[position].numbers for one in alike]
        if any(len(numbers) != len(called.numbers) for numbers in (before.numbers, again, *many)):
            return None
        kept = [count for count in step.follows if count.multiple and count.of(rows) == called.numbers[count.position]]
        known = {count.position for count in kept}
        changed = [
            RowCount(place, 0, number)
            for place, number in enumerate(called.numbers)
            if number is not None
            and before.numbers[place] is not None
            and place not in known
            and again[place] == before.numbers[place] != number
            and all(numbers[place] == number for numbers in many)
        ]
        found.append(replace(step, follows=(*kept, *changed)))
        is_one = step.name.startswith(OF_MODULES) and not step.enters
        position = called.after if is_one else position + 1
        position_of_fewer = before.after if is_one else position_of_fewer + 1
    return tuple(found) if position == len(calls) else None
