"""The gradients of a call on one worker, kept so that they can be differentiated again (`create_graph=True`).

Decides what such gradients are a function of, and that workers agree on which there are. Must not know the controller.

[Note: a call like others]
A call computes y from inputs x and parameters w. With the gradients g of y given, the gradients of x are a function
too, of g, x and w. Its result is kept with its history as that of a forward is, under the same interface: its backward
adds to the gradients of w, summed over the workers, and answers those of g and x; and it can be differentiated again.
Where rows of y depend on rows of x alone, the gradients of these rows do, so a split call stays split.

[Note: scales]
What is differentiated again are the gradients themselves. So where every worker computes the whole batch, nothing is
divided by the number of workers before the last backward, the one that sums over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.execution import Execution
from moreh_ap.parallelizer.call.forward import EagerForward, scaled_gradient


class GradientPass(EagerForward):
    """The gradients of another execution. See [Note: a call like others].

    Args:
        source: The other one.
        output_grads: As for its `backward`; those whose own gradients are wanted require one.
        kinds: The kinds of the results.
        watched: Leaves of its result, see `leaf`, whose gradients are wanted too.
        parameters: Parameters whose gradients are wanted too.

    Attributes:
        outputs: The gradients of the source's inputs, of what is watched, and of the parameters; None for each on which
            nothing depends.

    Raises:
        UnsupportedError: The source runs in micro-batches or stages.
    """

    _shares_history = True

    def __init__(
        self,
        source: Execution,
        output_grads: Sequence[Tensor | None],
        kinds: tuple[str, ...],
        watched: Sequence[int] = (),
        parameters: Sequence[Tensor] = (),
    ) -> None:
        roots = source.reached(output_grads)
        self._source, self.call, self.drawing = source, replace(source.call, kinds=kinds), source.drawing
        self.inputs = [*(grad for grad in output_grads if grad is not None and grad.requires_grad), *source.inputs]
        wanted = [*source.inputs, *(source.leaf(index) for index in watched), *parameters]
        found = _differentiate(source, roots, wanted)
        present, differentiable = _on_any_worker(self.call, found)
        self._keep([
            torch.zeros_like(leaf) if grad is None and is_there else grad
            for grad, leaf, is_there in zip(found, wanted, present, strict=True)
        ])  # fmt: skip
        self.differentiable = differentiable

    def leaf(self, index: int) -> Any:
        """Returns a leaf; behind its own come those of the source, which the gradients may depend on too."""
        own = len(self._results)
        return super().leaf(index) if index < own else self._source.leaf(index - own)

    def kind(self, index: int) -> str:
        own = len(self._results)
        return super().kind(index) if index < own else self._source.kind(index - own)

    def promised(self, index: int) -> torch.dtype:
        own = len(self._results)
        return super().promised(index) if index < own else self._source.promised(index - own)

    def _take_gradient(self, leaf: Tensor) -> Tensor:
        """Returns the gradient of a leaf; zeros where nothing depends on it, as between piecewise linear layers."""
        grad = super()._take_gradient(leaf)
        return torch.zeros_like(leaf) if grad is None else grad


def _differentiate(
    source: Execution, reached: Sequence[tuple[int, Tensor, Tensor]], wanted: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients of `wanted` with their history, None for those on which nothing depends.

    Args:
        source: Where the history is.
        reached: Results and their gradients. See [Note: scales].
        wanted: Tensors from which the results were computed.
    """
    call, roots, grads = source.call, [], []
    for index, result, grad in reached:
        roots.append(result)
        is_unsplit = call.mode == "unsplit"
        grads.append(grad.to(result.dtype) if is_unsplit else scaled_gradient(call, source.kinds[index], result, grad))
    leaves = [leaf for leaf in wanted if leaf is not None and leaf.requires_grad]
    if not roots or not leaves:
        return [None] * len(wanted)
    with source.drawing.backward():
        found = iter(torch.autograd.grad(roots, leaves, grads, create_graph=True, allow_unused=True))
    return [next(found) if leaf is not None and leaf.requires_grad else None for leaf in wanted]


def _on_any_worker(call: Call, found: Sequence[Tensor | None]) -> tuple[list[bool], list[bool]]:
    """Returns which gradients are there, and which can be differentiated, on this or another worker."""
    flags = [[grad is not None for grad in found], [grad is not None and grad.requires_grad for grad in found]]
    if call.mode == "split" and call.axis.size > 1:
        everywhere = torch.tensor(flags, dtype=torch.int32, device=call.device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=call.axis.group)
        flags = everywhere.bool().tolist()
    present, differentiable = flags
    return present, differentiable
