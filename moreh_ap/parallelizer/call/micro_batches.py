"""A call that runs in micro-batches, so that the activations of one micro-batch at a time are alive.

Decides the order of micro-batches and what is known before they run. Must not know how one of them runs (`forward.py`).

[Note: deferred]
The activations of a micro-batch are freed before the next one starts only if each runs forward and backward at once,
so nothing runs until `backward` is called. Two things are needed earlier. The denominators of mean losses belong to the
whole global batch, so a dry run finds them: on a copy of the module whose parameters are on meta, or, where its control
flow needs values, on the module itself without gradients. And a script may read a loss before backward: then a run
without gradients computes it, with the random numbers that the run in backward will use again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.execution import Execution
from moreh_ap.parallelizer.call.followed_forwards import Followed, FollowedForwards
from moreh_ap.parallelizer.call.forward import EagerForward, summing_gradients
from moreh_ap.parallelizer.data.bucketed_allreduce import gradient_sync_of
from moreh_ap.parallelizer.data.fsdp import before_the_last_backward
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.meta_reduction import MetaReduction
from moreh_ap.protocol.batch import row_range, slice_rows


class MicroBatchedForward(Execution):
    """A forward that waits for its backward.

    Args:
        call: What to run: a split call with `grad` and `kinds`.
        args: This worker's rows of the positional arguments.
        kwargs: This worker's rows of the keyword arguments.
        num_micro_batches: Number of micro-batches, the same on every worker.
        rows: Rows of the global batch.
        known: What is known of calls like this one before they run.
    """

    def __init__(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_micro_batches: int,
        rows: int,
        known: FollowedForwards,
    ) -> None:
        self.call = call
        self._leaves, self._spec = tree_flatten((tuple(args), dict(kwargs)))
        self._num_micro_batches = num_micro_batches
        self._rows = rows
        if call.mode == "split":
            start, stop = row_range(call.axis.rank, call.axis.size, rows)
            self._rows = stop - start
        self.inputs = [leaf for leaf in self._leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._outputs: Sequence[Any] | None = None
        self.is_computed = False
        drawing = call.random.begin(call.device)
        followed, self._denominators = known.run(
            call, self._leaves, self._spec, drawing, self._observed, self._run_without_gradients
        )
        self.shapes, self.treespec, self.repeats = followed.shapes, followed.treespec, followed.repeats
        self._recall(followed.noted)
        self.kinds = call.kinds or ("same",) * len(self.shapes)
        self.differentiable = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in self.shapes]
        self.drew = bool(call.random.draws.stream) or drawing.moved_host()
        if self.drew:
            self._draw()

    @property
    def outputs(self) -> Sequence[Any]:
        """Leaves of the result, from a run without gradients unless backward has computed them."""
        if self._outputs is None:
            self._set_outputs(self._compute_outputs())
        assert self._outputs is not None
        return self._outputs

    def _set_outputs(self, micro_batches: list[list[Any]]) -> None:
        """Keeps the leaves of the whole slice, given those of its micro-batches."""
        self._outputs = _Joined(self.kinds, micro_batches) if self.has_result else []
        self.is_computed = True

    def _compute_outputs(self) -> list[list[Any]]:
        call = replace(self.call, grad=False)
        return [
            list(self._run_micro_batch(call, micro_batch).outputs) for micro_batch in range(self._num_micro_batches)
        ]

    def _draw(self) -> None:
        """Leaves the streams where the whole call leaves them: every micro-batch draws for the whole batch."""
        self._run_micro_batch(replace(self.call, grad=False), 0)

    def backward(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        """Runs forward and backward of every micro-batch.

        A second call computes everything once more, so `retain_graph` needs nothing.
        """
        micro_batches: list[list[Any]] = []
        input_grads: list[list[Tensor | None]] = []
        with summing_gradients(self.call):
            for micro_batch in range(self._num_micro_batches):
                with (
                    nullcontext() if micro_batch == self._num_micro_batches - 1 else _before_the_last(self.call.module)
                ):
                    done = self._run_micro_batch(self.call, micro_batch)
                    input_grads.append(done.accumulate(self._gradients_of(output_grads, micro_batch)))
                if self._outputs is None:  # else they are those that the script has computed its loss from
                    micro_batches.append(list(done.outputs))
                del done
        if self._outputs is None:
            self._set_outputs(micro_batches)
        return [
            _join_gradients([grads[i] for grads in input_grads], leaf, self._rows) for i, leaf in enumerate(self.inputs)
        ]

    def _observed(self, meta_module: nn.Module, reduction: MetaReduction) -> AbstractContextManager[Any]:
        """Returns what has to be active while the module runs on meta, and gives what is noted then."""
        return nullcontext()

    def _recall(self, noted: Any) -> None:
        """Takes what was noted."""

    def _run_without_gradients(self) -> tuple[Followed, list[Tensor]]:
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        recorder = GlobalReduction(self.call.device, record=True, rules=self.call.rules)
        done = EagerForward(replace(self.call, grad=False), args, kwargs, reduction=recorder)
        return Followed(done.shapes, done.treespec, done.repeats), recorder.local_denominators

    def _run_micro_batch(self, call: Call, micro_batch: int) -> EagerForward:
        args, kwargs = self._arguments_of(micro_batch)
        reduction = GlobalReduction(call.device, denominators=self._denominators, rules=call.rules)
        call = replace(call, random=call.random.of_rows(*self._rows_of(micro_batch)))
        return EagerForward(call, args, kwargs, reduction=reduction, micro_batch=micro_batch)

    def _rows_of(self, micro_batch: int) -> tuple[int, int]:
        """Returns the first of this worker's rows in a micro-batch, and the one after its last."""
        return row_range(micro_batch, self._num_micro_batches, self._rows)

    def _arguments_of(self, micro_batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments of one micro-batch."""
        if self._num_micro_batches == 1:
            return tree_unflatten(self._leaves, self._spec)
        start, stop = self._rows_of(micro_batch)
        return tree_unflatten(slice_rows(self._leaves, self._rows, start, stop), self._spec)

    def _gradients_of(self, output_grads: Sequence[Tensor | None], micro_batch: int) -> list[Tensor | None]:
        start, stop = self._rows_of(micro_batch)
        grads: list[Tensor | None] = []
        for kind, grad in zip(self.kinds, output_grads, strict=True):
            if grad is None or kind == "share":
                grads.append(grad)
            else:
                entries = grad.shape[0] if kind == "rows" else 0  # a row may have several in dim 0, or a part of one
                first, last = start * entries // self._rows, stop * entries // self._rows
                own = grad[first:last] if kind == "rows" else grad / self._num_micro_batches
                grads.append(own)
        return grads


class _Joined(Sequence[Any]):
    """The leaves of a whole slice, each concatenated from its micro-batches when it is first read: logits are large."""

    def __init__(self, kinds: Sequence[str], micro_batches: list[list[Any]]) -> None:
        self._kinds = kinds
        self._pieces: list[Sequence[Any]] = list(zip(*micro_batches, strict=True))

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: Any) -> Any:
        kind, pieces = self._kinds[index], self._pieces[index]
        if len(pieces) > 1:
            if kind == "rows":
                pieces = (torch.cat(list(pieces)),)
            else:
                pieces = (sum(pieces[1:], start=pieces[0]) if kind == "share" else pieces[0],)
            self._pieces[index] = pieces
        return pieces[0]


@contextmanager
def _before_the_last(module: nn.Module) -> Iterator[None]:
    """Inside the block a backward is followed by another; what the last one outside leaves is summed over workers."""
    sync = gradient_sync_of(module)
    with before_the_last_backward(module), nullcontext() if sync is None else sync.local():
        yield


def _join_gradients(pieces: list[Tensor | None], leaf: Tensor, rows: int) -> Tensor | None:
    """Returns the gradient of one input from those of its micro-batches."""
    present = [piece for piece in pieces if piece is not None]
    if not present:
        return None
    if leaf.ndim >= 1 and leaf.shape[0] == rows:
        return torch.cat(present)
    return sum(present[1:], start=present[0])
