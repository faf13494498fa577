"""Gradients that the workers clip and unscale: the controller reads none of them, and waits for none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor
from moreh_ap.device.values import Cell
from moreh_ap.protocol.messages.state import ClipGradients, GradientNorm, ReleaseState
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.session.models.parameter_gradients import expected_will_do, list_of_one_model
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import ModelState, OnWorkers

ClipGradNorm = Callable[..., Tensor]


def clipping_on_workers(session: Session, original: ClipGradNorm) -> ClipGradNorm:
    """Returns the replacement of `torch.nn.utils.clip_grad_norm_`, which clips gradients on the workers.

    Args:
        session: The session of the workers.
        original: PyTorch's function, for gradients that are not on the workers.
    """

    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if session.check is not None:
            session.check.before_change(listed)
        found = None if error_if_nonfinite else _gradients_of(listed)
        if found is None:
            # PyTorch warns of a generator that yields nothing, for which it looks at the type.
            again = (one for one in listed) if isinstance(parameters, Generator) else listed
            with expected_will_do():
                return original(again, max_norm, norm_type, error_if_nonfinite, foreach)
        holder, refs, norm_like = found
        outbox = holder.session.outbox  # the script may have imported this function from workers that were lost since
        norm_ref, list_id = StateRef("session", "norm", str(outbox.new_id())), outbox.list_id(refs)
        outbox.post(GradientNorm(list_id, float(norm_type), norm_ref))
        outbox.post(ClipGradients(list_id, float(max_norm), norm_ref))
        norm = OnWorkers(holder.norms, norm_ref)
        weakref.finalize(norm, outbox.release, ReleaseState((norm_ref,)))
        with torch._C.DisableTorchFunction():  # questions about a meta tensor, which no mode has to look at
            return VirtualTensor(Cell(norm, ACCELERATOR), norm_like)

    return clip_grad_norm_


def _gradients_of(parameters: list[Tensor]) -> tuple[ModelState, tuple[StateRef, ...], Tensor] | None:
    """Returns whose the gradients on the workers are, their names, and a tensor with dtype and device of their norm.

    None if the parameters are not those of one model on the workers, or no parameter has a gradient.
    """
    found = list_of_one_model(parameters)
    if found is None:
        return None
    holder, names = found
    refs = holder.gradients.refs(names)
    if not refs:
        return None
    with torch._C.DisableTorchFunction():
        dtype = parameters[names.index(refs[0].name)].dtype.to_real()
        return holder, refs, torch.empty((), dtype=dtype, device="meta")


def norm_on_workers(
    tensors: list[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor | None:
    """Returns the total norm of tensors on the workers as a promise; None if a tensor is not on the workers.

    Raises:
        RuntimeError: If `error_if_nonfinite` and the norm is not finite, as `torch.nn.utils.get_total_norm` does.
    """
    refs = _refs(tensors)
    if not refs:
        return None
    holder = tensors[0]._cell.value.owner  # type: ignore[attr-defined]
    norm = holder.promise(torch.empty((), dtype=tensors[0].dtype.to_real(), device="meta"))
    outbox = holder.session.outbox
    outbox.post(GradientNorm(outbox.list_id(refs), float(norm_type), norm._cell.value.ref))
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )
    return norm


def clip_on_workers(parameters: list[Tensor], max_norm: float, total_norm: Tensor) -> bool:
    """Scales gradients of norm `total_norm` down to at most `max_norm`; False if some are not on the workers."""
    if not isinstance(total_norm, VirtualTensor) or not isinstance(total_norm._cell.value, OnWorkers):
        return False
    found = _gradients_of(parameters)
    refs = _refs([one.grad for one in parameters if one.grad is not None]) if found is None else found[1]
    if not refs:
        return False
    outbox = total_norm._cell.value.owner.session.outbox
    outbox.post(ClipGradients(outbox.list_id(refs), float(max_norm), total_norm._cell.value.ref))
    return True


def unscale_on_workers(session: Session, parameters: list[Tensor], found: Tensor, inverse_scale: Tensor) -> bool:
    """Unscales the gradients of the parameters of one model without a look at each of them, as `GradScaler` does.

    Returns:
        False if nothing was done: they are not those of one model on the workers, or float16.
    """
    if session.check is not None or any(parameter.dtype == torch.float16 for parameter in parameters):
        return False
    of_model = _gradients_of(parameters)
    return of_model is not None and of_model[0].norms.unscale(of_model[1], found, inverse_scale) is None


def _refs(tensors: list[Tensor]) -> tuple[StateRef, ...]:
    """Returns the names of the tensors on the workers; empty if a tensor is not on the workers."""
    values = [tensor._cell.value if isinstance(tensor, VirtualTensor) else None for tensor in tensors]
    if not all(isinstance(value, OnWorkers) for value in values):
        return ()
    return tuple(value.ref for value in values)  # type: ignore[union-attr]
