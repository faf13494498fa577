"""Gradient clipping where the gradients are: the norm over all workers, then one scaling, neither waited for."""

from __future__ import annotations

import torch
from torch import Tensor

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.protocol.messages.state import ClipGradients, GradientNorm
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import OnWorkers


def norm_on_workers(
    session: Session,
    tensors: list[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor | None:
    """The common norm of tensors that workers keep, as a promise; None if one of them is elsewhere.

    Raises:
        RuntimeError: If `error_if_nonfinite` and the norm is not finite, as `torch.nn.utils.get_total_norm` does.
    """
    refs = _refs(tensors)
    if not refs:
        return None
    holder = tensors[0]._cell.value.owner  # type: ignore[attr-defined]
    norm = holder.promise(torch.empty((), dtype=tensors[0].dtype, device="meta"))
    session.outbox.post(GradientNorm(session.outbox.list_id(refs), float(norm_type), norm._cell.value.ref))
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )
    return norm


def clip_on_workers(session: Session, parameters: list[Tensor], max_norm: float, total_norm: Tensor) -> bool:
    """Scale gradients so that their norm of `total_norm` becomes at most `max_norm`; False if some are elsewhere."""
    refs = _refs([grad for grad in (parameter.grad for parameter in parameters) if grad is not None])
    if not refs or not isinstance(total_norm, VirtualTensor) or not isinstance(total_norm._cell.value, OnWorkers):
        return False
    session.outbox.post(ClipGradients(session.outbox.list_id(refs), float(max_norm), total_norm._cell.value.ref))
    return True


def _refs(tensors: list[Tensor]) -> tuple[StateRef, ...]:
    """Names of the tensors on the workers; empty if there are none or one of them is elsewhere."""
    values = [tensor._cell.value if isinstance(tensor, VirtualTensor) else None for tensor in tensors]
    if not all(isinstance(value, OnWorkers) for value in values):
        return ()
    return tuple(value.ref for value in values)  # type: ignore[union-attr]
