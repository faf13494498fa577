"""Several workers on one GPU, for tests alone: NCCL refuses it, and gloo lacks some operations on GPU tensors.

Decides how those are done: messages go by way of host memory, and DTensor's gather, which ends the process on a GPU
(torch 2.11: gloo reads the device's addresses in `allgather_into_tensor_coalesced`), is the plain gather. Sums, plain
gathers and broadcasts are gloo's own. The variable that asks for it is read in `worker_environment.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from moreh_ap.patching import Patches


def install(patches: Patches) -> None:
    """Has messages between workers go through host memory."""
    group = patches.group("gloo sends no tensors of a GPU.")
    effect = "Sends by way of host memory; for tests with several workers on one GPU."

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        return [StagedWork(operation, _is_on_device) for operation in operations]

    def send(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        original_send(tensor.cpu(), *args, **kwargs)

    def recv(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        received = tensor.cpu()
        sender = original_recv(received, *args, **kwargs)
        tensor.copy_(received)
        return sender

    def all_gather_tensor(own: Tensor, gather_dim: int, group: Any, tag: str = "") -> Tensor:
        if not _is_on_device(own):
            return cast(Tensor, original_gather(own, gather_dim, group, tag))
        mesh, axis = group  # as DTensor says it
        return gathered(own, gather_dim, mesh.get_group(axis))

    group.replace(dist, "batch_isend_irecv", batch_isend_irecv, effect)
    original_gather = group.replace(functional, "all_gather_tensor", all_gather_tensor, "Gathers as the plain gather.")
    original_send = group.replace(dist, "send", send, effect)
    original_recv = group.replace(dist, "recv", recv, effect)


def gathered(own: Tensor, gather_dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns the tensors of all members, one behind the other along a dim."""
    parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, gather_dim)


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda


class StagedWork:
    """One message under way; `wait` puts what has arrived where it was wanted.

    Args:
        operation: A `torch.distributed.P2POp`.
        is_staged: Whether its tensor goes by way of host memory.
    """

    def __init__(self, operation: Any, is_staged: Callable[[Tensor], bool]) -> None:
        self._tensor: Tensor = operation.tensor
        self._host = self._tensor.detach().to("cpu", copy=True) if is_staged(self._tensor) else self._tensor
        place = "group_dst" if operation.op is dist.isend else "group_src"
        self._receives = operation.op is dist.irecv
        where = {"group": operation.group, "tag": operation.tag, place: operation.group_peer}
        self._work = operation.op(self._host, **where)

    def wait(self, *args: Any) -> bool:
        """Waits for the message."""
        done = bool(self._work.wait(*args))
        if self._receives and self._host is not self._tensor:
            self._tensor.copy_(self._host)
        return done

    def is_completed(self) -> bool:
        """Returns whether `wait` would not wait."""
        return bool(self._work.is_completed())
