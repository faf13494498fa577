"""Forwards that are followed without values before they run, once for each kind of call.

Decides when a forward has to be followed anew, and what workers tell each other of it. Must not know what its result is
needed for (`micro_batches.py`).

[Note: followed once]
To follow a forward costs the host a forward of the whole model, on every worker. So what was found is remembered with
the call that was prepared: all calls that come to it have the same sizes, training flags and attributes. Denominators
depend on the numbers in the inputs too; the few operations that lead to them are computed again
(`input_operations.py`). A forward that draws random numbers, or changes attributes of the model, is followed each time.
All workers have to do the same, as they add up their denominators: whether they remember is agreed when a forward is
followed, and where numbers in the inputs may lead elsewhere, whether they do is agreed each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from moreh_ap.errors import ExactnessError
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.execution import repeats_in
from moreh_ap.parallelizer.call.extension import Findings, extended, prepared
from moreh_ap.parallelizer.loss.input_operations import InputOperationRecorder, InputOperations
from moreh_ap.parallelizer.loss.meta_reduction import MetaReduction
from moreh_ap.parallelizer.rng.policy import Drawing
from moreh_ap.protocol.module_attributes import Attributes
from moreh_ap.protocol.pytree import flatten
from moreh_ap.protocol.script_code.script_functions import behind_own_call

_MOST_WAYS = 4  # that the forwards of one kind of call are remembered to take
_MOST_FAILURES = 3  # to remember a forward: the first ones may set up what later ones use

Observe = Callable[[nn.Module, MetaReduction], AbstractContextManager[Any]]
"""Returns what is active while the module runs on meta; what that gives is remembered as `noted`."""


@dataclass(frozen=True)
class Followed:
    """What a forward does, without its numbers.

    Attributes:
        shapes: The leaves of its result; tensors may be on meta.
        treespec: How they nest.
        repeats: As of `Execution`.
        noted: What was noted beside.
        operations: Gives the denominators for other inputs; None where the forward has to be followed anew.
    """

    shapes: Sequence[Any]
    treespec: Any
    repeats: Mapping[int, int]
    noted: Any = None
    operations: InputOperations | None = None


class FollowedForwards:
    """The forwards of one kind of call that were followed.

    Args:
        meta_module: A copy of the model on meta that no plan was applied to; None: the model itself has to run.
    """

    def __init__(self, meta_module: nn.Module | None) -> None:
        self._meta_module = meta_module
        self._known: list[Followed] = []
        self._num_sites = 0
        self._may_differ = False
        self._failures = 0

    def run(
        self,
        call: Call,
        leaves: Sequence[Any],
        spec: Any,
        drawing: Drawing,
        observe: Observe,
        run_without_gradients: Callable[[], tuple[Followed, list[Tensor]]],
    ) -> tuple[Followed, list[Tensor]]:
        """Returns what a forward does, and the denominators of its mean losses over the batch. A collective.

        Args:
            call: What is to run.
            leaves: This worker's rows of the leaves of the arguments.
            spec: How they nest.
            drawing: The random numbers of the forward.
            observe: Notes what else is needed.
            run_without_gradients: Runs the model itself, and returns the same with this worker's denominators.

        Raises:
            ExactnessError: Workers take different numbers of means.
        """
        again = self._again(call, leaves) if self._known else None
        if again is not None:
            return again
        found = None
        if self._meta_module is not None and call.target is None:
            found = self._follow(self._meta_module, call, leaves, spec, drawing, observe)
        if not _smallest(call, int(found is not None)):
            found = run_without_gradients()
        assert found is not None  # it was run on every worker otherwise
        followed, local = found
        way = followed.operations
        fewest, most = _smallest(call, len(local)), -_smallest(call, -len(local))
        if fewest != most:
            raise ExactnessError(
                f"rows decide how many means over the batch a forward takes: {fewest} on one device, {most} on another",
                "the same number of mean losses for all rows",
                'plan="micro_batches=1"',
            )
        can_repeat = _smallest(call, int(way is not None)) == 1
        may_differ = _smallest(call, int(way is None or not way.reads)) == 0
        self._remember(followed, len(local), can_repeat, may_differ)
        return followed, list(_add_up(call, _stacked(local)).unbind())

    def _again(self, call: Call, leaves: Sequence[Any]) -> tuple[Followed, list[Tensor]] | None:
        """Returns what `run` does, from what is remembered; None if a worker's inputs lead elsewhere."""
        followed, local = self._known_way(call, leaves)
        if self._may_differ and not _smallest(call, int(followed is not None)):  # on any worker
            return None
        assert followed is not None
        return followed, list(_add_up(call, _stacked(local)).unbind())

    def _known_way(self, call: Call, leaves: Sequence[Any]) -> tuple[Followed | None, list[Tensor]]:
        for followed in self._known:
            assert followed.operations is not None
            reduction = MetaReduction(call.device, rules=call.rules)
            with torch.no_grad():
                if followed.operations.run(leaves, reduction.compute):
                    return followed, reduction.local_denominators
        return None, []

    def _remember(self, followed: Followed, num_sites: int, can_repeat: bool, may_differ: bool) -> None:
        """Remembers a forward, as all workers do.

        Args:
            followed: What it does on this worker.
            num_sites: How many denominators it has, on every worker.
            can_repeat: Whether every worker can find them for other inputs.
            may_differ: Whether inputs may lead elsewhere on any worker.
        """
        self._failures += not can_repeat
        if not can_repeat or num_sites != self._num_sites:
            self._known.clear()
        if can_repeat:
            self._known = [followed, *self._known[: _MOST_WAYS - 1]]
            self._num_sites, self._may_differ = num_sites, self._may_differ or may_differ

    def _follow(
        self, module: nn.Module, call: Call, leaves: Sequence[Any], spec: Any, drawing: Drawing, observe: Observe
    ) -> tuple[Followed, list[Tensor]] | None:
        """Runs the module on meta; returns None where that is not enough."""
        for real, meta in zip(call.module.modules(), module.modules(), strict=False):
            meta.training = real.training
        args, kwargs = prepared(call.extensions, module, *tree_unflatten(list(leaves), spec))
        rules = call.rules  # of places in the code, from where nothing is repeated
        knows_places = bool(rules.beside_rows or rules.constants or rules.loads)
        tries = self._failures < _MOST_FAILURES and not knows_places
        recorder = InputOperationRecorder(leaves) if tries else None
        attributes = Attributes(module)
        before, stream = attributes.marks(), _stream_of(call.device)
        reduction = MetaReduction(call.device, rules=call.rules, recorder=recorder)
        try:
            with torch.no_grad(), reduction, observe(module, reduction) as noted:
                forward = lambda args, kwargs: behind_own_call(module)(*args, **kwargs)  # noqa: E731
                result = extended(call.extensions, Findings(), module, forward)(args, kwargs)
        except Exception:  # any error of a model that asks a meta tensor for a value: the real module is run instead
            return None
        shapes, treespec = flatten(result)
        repeats = repeats_in(shapes)
        has_effects = drawing.moved() or stream != _stream_of(call.device) or bool(attributes.changed(before))
        operations = None if recorder is None or has_effects else recorder.operations(len(reduction.local_denominators))
        if operations is not None:  # what is remembered keeps no tensor of this batch
            shapes = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in shapes]
        return Followed(shapes, treespec, repeats, noted, operations), reduction.local_denominators


def _stacked(numbers: list[Tensor]) -> Tensor:
    """Returns denominators as one tensor, (sites,) in float64."""
    return torch.stack(numbers) if numbers else torch.empty(0, dtype=torch.float64)


def _add_up(call: Call, numbers: Tensor) -> Tensor:
    """Returns the sums over the workers of a tensor, on the device where it has to be for that."""
    if call.axis.size > 1 and len(numbers):
        numbers = numbers.to(call.device)
        dist.all_reduce(numbers, group=call.axis.group)
    return numbers


def _smallest(call: Call, own: int) -> int:
    """Returns the smallest of the workers' numbers."""
    if call.axis.size == 1:
        return own
    number = torch.tensor(own, device=call.device)
    dist.all_reduce(number, op=dist.ReduceOp.MIN, group=call.axis.group)
    return int(number.item())


def _stream_of(device: torch.device) -> bytes:
    """Returns what tells where the stream of random numbers of a GPU is; nothing for a CPU."""
    return torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
