"""What travels between the stages of a forward that runs through all of them at once.

Decides how sizes are sent along, and an error in place of a result. Must not know what a stage computes. Under a
schedule sizes are known beforehand, and PyTorch sends; see `schedules.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.pipeline.stage import Nesting, Travelling
from moreh_ap.protocol.pytree import pickle_treespec, unpickle_treespec


class StageFailed(Exception):
    """Another stage of the pipeline raised an error, for which this one waited; the text is what it was."""


def send(axis: Axis, place: int, tensors: list[Tensor], nesting: Nesting | None) -> None:
    """Sends what a stage returned to the worker with the next one, without its history."""
    assert nesting is not None
    specs = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
    packed = pickle_treespec(nesting.treespec)
    header = (specs, nesting.leaves, nesting.is_tensor, packed, [mark.length for mark in nesting.marks])
    dist.send_object_list([header], group=axis.group, group_dst=place)
    for tensor in tensors:
        dist.send(tensor.detach().contiguous(), group=axis.group, group_dst=place)


def send_failure(axis: Axis, place: int, error: Exception) -> None:
    """Sends an error in place of what the worker at a place waits for."""
    told = str(error) if isinstance(error, StageFailed) else f"{type(error).__name__}: {error}"
    dist.send_object_list([told], group=axis.group, group_dst=place)


def receive_header(axis: Axis, place: int) -> Any:
    """Returns what comes before the tensors of a stage.

    Raises:
        StageFailed: It has failed, and sends none.
    """
    header: list[Any] = [None]
    dist.recv_object_list(header, group=axis.group, group_src=place)
    if isinstance(header[0], str):
        raise StageFailed(header[0])
    return header[0]


def receive(axis: Axis, place: int, device: torch.device) -> tuple[list[Tensor], Nesting]:
    """Returns what a stage has sent, on this worker's device, and how it nests.

    Raises:
        StageFailed: It has failed, and sends none.
    """
    with torch._C.DisableTorchFunction():  # what the forward itself does is observed, not how it gets its inputs
        specs, leaves, is_tensor, packed, lengths = receive_header(axis, place)
        received = []
        for shape, dtype, requires_grad in specs:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, group=axis.group, group_src=place)
            received.append(tensor.requires_grad_(requires_grad and torch.is_grad_enabled()))
    marks = tuple(map(Travelling, lengths))
    return received, Nesting(leaves, is_tensor, unpickle_treespec(packed), marks)
