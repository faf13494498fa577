"""A few rows of a batch run together on each worker, and shared among the workers with statistics of all of them.

Decides how that is tried where batch normalisation makes rows depend on each other: as a real split call, whose
workers exchange statistics. Must not know what follows from it (`split_check.py`).

[Note: rounding]
Normalisation by statistics of few values makes differences in the last digits large, the more so the more layers there
are. A value that comes to the other side of zero that way changes what a ReLU lets through in the backward: gradients
of a ResNet-18 of 16 small pictures differ by one part in a hundred, of what is the same mathematics. So they are
compared by their norms here, and with what the same rows give when the inputs differ in the last digits. Statistics
or a sum that workers would not have exchanged change gradients by far more. Where so much is rounding that nothing is
shown, the same is tried in float64 (`statistics/float64_trial.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from moreh_ap.parallelizer.call.forward import EagerForward
from moreh_ap.parallelizer.call.pipelined_forward import PipelinedPass
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.mean_functions import takes_statistics
from moreh_ap.parallelizer.loss.mean_rules import MeanRules
from moreh_ap.parallelizer.observation.torch_calls import asks_for_sizes
from moreh_ap.parallelizer.rng.policy import RandomPolicy
from moreh_ap.parallelizer.state.loading import local_shard
from moreh_ap.parallelizer.statistics.batch_parts import BatchParts, Part, part_of, tensor_names, whole_parts
from moreh_ap.parallelizer.statistics.batch_statistics import JoinedReduction
from moreh_ap.parallelizer.trial.dry_run import NoDropout, PaddedAlike, Refused, attempt
from moreh_ap.parallelizer.trial.probe import Probe, Result
from moreh_ap.parallelizer.trial.row_comparison import close, sort_by_class, take_gradients
from moreh_ap.protocol.batch import row_range
from moreh_ap.protocol.pytree import pickle_treespec, unpickle_treespec

MAX_ROWS = 16
FEWEST_A_WORKER, MOST_A_WORKER = 2, 8
"""Rows that run together, and that each worker runs, if the batch has so many. Of two values a channel, normalisation
leaves the signs; of few it makes large numbers of rounding."""
_PERTURBATIONS = {torch.float32: 2.0**-20, torch.float64: 2.0**-49}
ROUNDING = 10.0
"""How much more than a change of the inputs by `_PERTURBATIONS` (eight units in the last place) rounding may change."""
ALL_ROUNDING, SMALLEST = 1.0, 1e-30
_MOST_ROUNDING = 0.05
"""Where rounding is a larger part of a gradient or output, nothing is shown; `ALL_ROUNDING`: where it is all of it."""
_MOST_ROUNDING_OF_BUFFERS = 0.001
"""The same of a buffer, most of which is its earlier value (momentum 0.1)."""
_CUTTING = frozenset({"chunk", "split", "tensor_split", "split_with_sizes", "narrow", "unfold", "unbind", "__iter__"})
_BATCH_NORM = inspect.signature(F.batch_norm)


class JoinedProbe(Probe):
    """The common run, and one run on each worker of its share of the rows. A collective; see `Probe`.

    Attributes:
        parts: Which normalisations take the statistics of parts of the batch.
        counts_rows: Whether the forward asks how many rows there are, or cuts them, on any worker.
    """

    is_joined = True
    _least_each = FEWEST_A_WORKER
    parts: tuple[Part, ...] = ()
    counts_rows = False
    _noise = 0.5
    """A bias in front of batch normalisation has a gradient of zero, which is the difference of large sums."""
    _least_rounding = 0.02
    """Part of a gradient's norm that rounding explains in any case. See [Note: rounding]."""

    def _choose_rows(self) -> list[int]:
        workers = self.call.axis.size
        each = max(self.each, min(MOST_A_WORKER, MAX_ROWS // workers))
        number = workers * min(each, self.rows // workers)
        chosen = [place * self.rows // number for place in range(number)]
        if self._gathers:
            return chosen
        return sort_by_class([leaf for leaf, dim in zip(self._leaves, self.dims, strict=True) if dim == 0], chosen)

    def _find_rounding(self, common: EagerForward | PipelinedPass) -> None:
        """Runs the same rows with inputs that differ in the last digits. See [Note: rounding].

        A forward that compares its inputs with numbers may raise an error then, which says nothing about its rows.
        """
        self._output_rounding = [0.0] * len(common.outputs)
        self._gradient_rounding = dict.fromkeys(self._wanted, 0.0)
        runs: list[EagerForward | PipelinedPass] = []
        recorder = GlobalReduction(self.call.device, record=True)
        if attempt(lambda: runs.append(self._run(self.chosen, recorder, perturbed)), self.call.module):
            self._changed_buffers = {}
            return
        (other,) = runs
        self._output_rounding = [
            _difference(one, another, torch.inf) for one, another in zip(common.outputs, other.outputs, strict=True)
        ]
        if self.call.grad:
            self._go_back(other, self._weights)
            found = take_gradients(self.call.module)
            self._gradient_rounding = {name: _difference(want, found[name], 2.0) for name, want in self._wanted.items()}

    def _tolerance_of(self, output: int) -> float:
        return max(self._tolerance, min(ROUNDING * self._output_rounding[output], _MOST_ROUNDING))

    def _is_same_buffer(self, name: str, value: Tensor) -> bool:
        """The running mean behind a linear layer whose inputs are normalised is zero but for rounding: it is compared
        with the largest entry of the others of its name."""
        _, _, last = name.rpartition(".")
        alike = [buffer for other, buffer in self._buffers.items() if other.rpartition(".")[2] == last]
        largest = max(float(torch.linalg.vector_norm(one.float(), torch.inf)) for one in alike if one.numel())
        wanted = self._buffers[name]
        changed = self._changed_buffers.get(name, wanted)
        return is_rounding_of_buffer(value, wanted, changed, self._tolerance, self._noise * self._tolerance * largest)

    def _is_rounding(self, name: str, got: Tensor, want: Tensor, noise: float) -> bool:
        explained = max(self._least_rounding, min(ROUNDING * self._gradient_rounding[name], _MOST_ROUNDING))
        return (
            super()._is_rounding(name, got, want, noise)
            or _difference(want, got, 2.0) <= explained
            or float(torch.linalg.vector_norm(got - want)) <= noise * want.numel() ** 0.5
        )

    def _run_apart(self, denominators: Sequence[Tensor]) -> tuple[list[Result], list[Sequence[Tensor]]]:
        call, axis = self.call, self.call.axis
        self._refuse_what_fails_alone(denominators)
        mark = replace(call.random, draws=self.draws).fingerprint()
        reduction = self._reduction(mark)
        each = len(self.chosen) // axis.size
        run = self._run(self.chosen[axis.rank * each : (axis.rank + 1) * each], reduction, mode="split")
        self._used = reduction
        self._singles = [run]
        leaves = tree_map_only(Tensor, lambda leaf: leaf.detach().cpu(), list(run.outputs))
        counted = [one.cpu() for one in reduction.local_denominators]
        found: list[Any] = [None] * axis.size
        dist.all_gather_object(found, (pickle_treespec(run.treespec), leaves, counted), group=axis.group)
        results = [
            (unpickle_treespec(spec), tree_map_only(Tensor, lambda leaf: leaf.to(call.device), leaves))
            for spec, leaves, _ in found
        ]
        return results, [counted for _, _, counted in found]

    def _refuse_what_fails_alone(self, lengths: Sequence[Tensor]) -> None:
        """Runs each worker's rows without the others: an error in the run below would leave those waiting for it.

        Args:
            lengths: The largest numbers of all rows together, at the sites where they were taken.

        Raises:
            Refused: The rows of a worker raise an error by themselves, as where labels count rows of the batch.
        """
        call, axis = self.call, self.call.axis
        each = len(self.chosen) // axis.size
        args, kwargs = self._arguments(self.chosen[axis.rank * each :][:each])

        for grad in dict.fromkeys((False, call.grad)):  # a forward may put hooks on what needs a gradient
            alone, reason = self._run_alone(args, kwargs, lengths, grad)
            numbers = torch.tensor([reason != "", alone.counts_rows], dtype=torch.int64, device=call.device)
            dist.all_reduce(numbers, group=axis.group)
            failed, counting = numbers.tolist()
            self.counts_rows = counting > 0
            if not failed:
                break
        if failed:
            raise Refused(reason or "the rows of another worker raised an error by themselves")

    def _run_alone(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], lengths: Sequence[Tensor], grad: bool = False
    ) -> tuple[_Alone, str]:
        """Runs some rows without the other workers; returns what was noted, and why they could not run ("": they
        could)."""
        call = replace(self.call, random=RandomPolicy(), grad=grad)
        alone = _Alone(call.device, rules=call.rules, lengths=lengths, names=tensor_names(call.module))

        def run() -> None:
            with self._from_the_same_state(), NoDropout(), self._beside_others(()):
                EagerForward(call, args, kwargs, reduction=alone)

        return alone, attempt(run, call.module)

    def find_parts(self, *, until_errors: bool = False) -> tuple[Part, ...] | None:
        """Returns which normalisations take their statistics of parts of the batch that workers have whole; None if
        some take those of other rows than a worker's or all. A collective. See [Note: how many parts] in
        `batch_parts.py`.

        Args:
            until_errors: Whether the rows of a worker may raise an error by themselves behind all normalisations.
        """
        axis, sizes = self.call.axis, []
        for start, stop in (row_range(axis.rank, axis.size, self.rows), (0, self.rows)):
            alone, reason = self._run_alone(*self._arguments(range(start, stop)), ())
            may_fail = until_errors and stop - start < self.rows
            sizes.append(None if reason and not may_fail else alone.sizes)
        everyone: list[Any] = [None] * axis.size
        dist.all_gather_object(everyone, sizes, group=axis.group)
        own, of_batch = zip(*everyone, strict=True)
        return None if None in of_batch else whole_parts(of_batch[0], own)

    def _reduction(self, mark: Callable[[], int] | None) -> JoinedReduction:
        call = self.call
        parts = BatchParts(self.parts, call.module) if self.parts else None
        return JoinedReduction(call.device, axis=call.axis, rules=call.rules, mark=mark, parts=parts)

    def _go_back(self, run: EagerForward | PipelinedPass, gradients: Sequence[Tensor | None]) -> None:
        with self._left[run].there():
            run.backward(gradients)

    def _backward_apart(self) -> None:
        self._go_back(self._singles[0], self._share_of(self.call.axis.rank, self.call.axis.size))


class _Alone(PaddedAlike):
    """Leaves batch normalisation out, which refuses a single value a channel.

    Args:
        device, rules, lengths: See `PaddedAlike`.
        names: Those of the model's tensors.

    Attributes:
        sizes: Of how many values a channel each normalisation takes its statistics.
        counts_rows: Whether the forward asks for the sizes of tensors, or cuts them into parts.
    """

    def __init__(
        self, device: torch.device, *, rules: MeanRules, lengths: Sequence[Tensor], names: Mapping[int, str]
    ) -> None:
        super().__init__(device, rules=rules, lengths=lengths)
        self.sizes: dict[Part, list[int]] = {}
        self.counts_rows = False
        self._names = names

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts_rows |= asks_for_sizes(func, counts=True) or cuts_rows(func, args)
        if func is F.batch_norm:
            call = _BATCH_NORM.bind(*args, **(kwargs or {}))
            call.apply_defaults()
            x = call.arguments["input"]
            if takes_statistics(func, args, kwargs or {}):
                sizes = self.sizes.setdefault(part_of(call.arguments, self._names), [])
                sizes.append(x.numel() // max(1, x.shape[1]))
            return x.clone()
        return super().__torch_function__(func, types, args, kwargs)


def cuts_rows(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Says whether a torch function may cut rows into parts: by its name, or with a slice along dim 0."""
    name = getattr(func, "__name__", "")
    if name != "__getitem__":
        return name in _CUTTING
    first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    return isinstance(first, slice) and first != slice(None)


def perturbed(leaf: Any) -> Any:
    """Returns a tensor with every other entry a little larger and the rest a little smaller.

    Whole numbers among fractions stay as they are: they may be classes, or -1 in place of a box that is none.
    """
    if not isinstance(leaf, Tensor) or leaf.dtype not in _PERTURBATIONS:
        return leaf
    signs = torch.arange(leaf.numel(), device=leaf.device).view(leaf.shape) % 2 * 2 - 1
    change = leaf * (signs * _PERTURBATIONS[leaf.dtype]).to(leaf.dtype)
    is_fraction = leaf != leaf.round()
    return leaf + (torch.where(is_fraction, change, 0.0) if is_fraction.any() else change)


def is_rounding_of_buffer(got: Tensor, wanted: Tensor, changed: Tensor, tolerance: float, noise: float) -> bool:
    """Says whether rounding explains the difference of two buffers.

    Args:
        got: What the buffer became, of any shape.
        wanted: What it became where all rows ran together, of the same shape.
        changed: The same with inputs that differ in the last digits.
        tolerance: Part of the largest entry that rounding explains in any case.
        noise: Difference that rounding explains in any case.
    """
    shown = min(ROUNDING * _difference(wanted, changed, torch.inf), _MOST_ROUNDING_OF_BUFFERS)
    return close(got, wanted, max(tolerance, shown), noise)


def _difference(one: Any, other: Any, order: float) -> float:
    """Returns the norm of the difference of two tensors, as a part of the first one's; 0 for anything else."""
    if not isinstance(one, Tensor) or not one.is_floating_point() or not one.numel():
        return 0.0
    one, other = local_shard(one), local_shard(other)
    if one.shape != other.shape or not torch.isfinite(one).all():
        return 0.0
    norms = [torch.linalg.vector_norm(tensor.float(), order) for tensor in (one - other, one)]
    return float(norms[0]) / max(float(norms[1]), SMALLEST)
