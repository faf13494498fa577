"""Ties a graph of ordinary tensors into autograd's graph of accelerator tensors, as one node.

Decides how gradients pass between the two, in any order of derivatives. Must not know what was computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from moreh_ap.device.tensor import on_host, place

Around = Callable[[], AbstractContextManager[None]]


def tie(
    outputs: Sequence[Any],
    inputs: Sequence[Tensor],
    accelerator_inputs: Sequence[Tensor],
    around: Around = nullcontext,
    *,
    is_shared: bool = False,
) -> list[Any]:
    """Returns `outputs` with every tensor on the accelerator.

    Args:
        outputs: Ordinary tensors of any shape, and what else a call returned, which stays as it is.
        inputs: The ordinary tensors from which the outputs were computed, leaves of their graph.
        accelerator_inputs: For each of them the accelerator tensor whose value it has.
        around: What has to be active in the backward, where checkpointed blocks are computed again.
        is_shared: Whether another node's backward runs through the same ordinary graph, so that none may free it.
    """
    tensors = [output for output in outputs if isinstance(output, Tensor)]
    with torch._C.DisableTorchFunction():
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            placed = iter(_Tie.apply(around, is_shared, tensors, inputs, *accelerator_inputs))
        else:
            placed = map(place, tensors)
    return [next(placed) if isinstance(output, Tensor) else output for output in outputs]


class _Tie(torch.autograd.Function):
    """Its inputs and outputs are accelerator tensors; its backward is that of the ordinary graph."""

    @staticmethod
    def forward(
        ctx: Any,
        around: Around,
        is_shared: bool,
        outputs: list[Tensor],
        inputs: Sequence[Tensor],
        *accelerator_inputs: Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.around, ctx.is_shared = around, is_shared
        ctx.outputs, ctx.inputs, ctx.accelerator_inputs = outputs, inputs, accelerator_inputs
        placed = [place(output.detach()) for output in outputs]
        ctx.versions = [(weakref.ref(one), one._version) for one in (*placed, *accelerator_inputs)]
        ctx.mark_non_differentiable(*[one for one, output in zip(placed, outputs) if not output.requires_grad])
        return tuple(placed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        pairs = [(output, one) for output, one in zip(ctx.outputs, gradients) if one is not None]
        if not pairs:
            return None, None, None, None, *[None for _ in ctx.inputs]
        outputs, given = [output for output, _ in pairs], [on_host(one) for _, one in pairs]
        with torch._C.DisableTorchFunction():
            for tensor, (placed, version) in zip((*ctx.outputs, *ctx.inputs), ctx.versions):
                accelerator_tensor = placed()
                if accelerator_tensor is not None and accelerator_tensor._version != version:
                    increment_version(tensor)  # an operation in place on the one has changed the memory of the other
        if torch.is_grad_enabled():
            with ctx.around():
                return None, None, None, None, *_differentiable(ctx, outputs, given, [one for _, one in pairs])
        keeps = ctx.is_shared or torch._C._autograd._get_current_graph_task_keep_graph()
        # Not `torch.autograd.grad`: blocks that are computed again by reentrant checkpointing refuse it.
        with ctx.around():
            torch.autograd.backward(outputs, given, retain_graph=keeps)
        with torch._C.DisableTorchFunction():
            return None, None, None, None, *map(_take_gradient, ctx.inputs)


def _take_gradient(tensor: Tensor) -> Tensor | None:
    gradient, tensor.grad = tensor.grad, None
    return None if gradient is None else place(gradient)


def _differentiable(ctx: Any, outputs: list[Tensor], given: list[Tensor], gradients: list[Tensor]) -> list[Any]:
    """Returns the gradients of the inputs, tied to the graph of their own computation."""
    ctx.is_shared = True
    given = [one.detach().requires_grad_() for one in given]
    found = torch.autograd.grad(outputs, ctx.inputs, given, create_graph=True, allow_unused=True)
    return tie(found, [*ctx.inputs, *given], [*ctx.accelerator_inputs, *gradients], ctx.around, is_shared=True)
