"""How activations cross the tensor axis: between tensors that every rank has in full and tensors that are sharded.

Decides which collective a crossing takes, forward and backward. Must not know models, layers or parameters.

[Note: gradients at a crossing]
Three states, as in DTensor: *replicated* (every rank has the full tensor), *split* (every rank has a shard along a dim)
and *partial* (the whole is the sum over ranks). Outside of split regions values and gradients are replicated. Inside, a
replicated value has partial gradients, since every rank sees only what its part of the layer makes of it; summing them
is the business of the crossing that led in. Every crossing is a redistribution of a DTensor, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from moreh_ap.parallelizer.state.tensor_layout import shard_range


@dataclass(frozen=True)
class Crossing:
    """The tensor axis, seen from one rank.

    Attributes:
        mesh: A mesh of one dim.
    """

    mesh: DeviceMesh

    @property
    def rank(self) -> int:
        """This worker's place on the axis."""
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        """Number of workers on the axis."""
        return self.mesh.size()

    @property
    def group(self) -> dist.ProcessGroup:
        """The workers on the axis."""
        return self.mesh.get_group()

    def enter(self, full: Tensor) -> Tensor:
        """Replicated -> replicated with partial gradients. Backward: all-reduce. For weights too."""
        if not (torch.is_grad_enabled() and full.requires_grad):
            return full
        return _Cross.apply(full, self, None, (Partial(), Replicate()))

    def leave(self, partial: Tensor) -> Tensor:
        """Partial -> replicated: all-reduce. Backward: nothing."""
        return _Cross.apply(partial, self, (Partial(), Replicate()), None)

    def gather(self, shard: Tensor, dim: int, length: int) -> Tensor:
        """Split along `dim`, `length` altogether -> replicated: all-gather. Backward: takes this rank's shard."""
        split = Shard(dim % shard.ndim)
        return _Cross.apply(shard, self, (split, Replicate()), (Replicate(), split), length)

    def take(self, full: Tensor, dim: int) -> Tensor:
        """Replicated -> split along `dim`: nothing. Backward: all-gather."""
        split = Shard(dim % full.ndim)
        return _Cross.apply(full, self, (Replicate(), split), (split, Replicate()), full.shape[dim])

    def gather_into(self, shard: Tensor, dim: int, length: int) -> Tensor:
        """Split along `dim` -> replicated with partial gradients: all-gather. Backward: reduce-scatter."""
        split = Shard(dim % shard.ndim)
        return _Cross.apply(shard, self, (split, Replicate()), (Partial(), split), length)

    def leave_split(self, partial: Tensor, dim: int) -> Tensor:
        """Partial -> split along `dim`: reduce-scatter. Backward: all-gather."""
        split = Shard(dim % partial.ndim)
        return _Cross.apply(partial, self, (Partial(), split), (split, Replicate()), partial.shape[dim])

    def shard_range(self, length: int) -> tuple[int, int]:
        """Returns the range that this rank has of `length` elements."""
        return shard_range(length, self.size, self.rank)

    def redistribute(self, local: Tensor, change: tuple[Placement, Placement] | None, length: int | None) -> Tensor:
        """Returns what a local tensor becomes when the DTensor that it is of changes its placement. Not for autograd.

        Args:
            local: What is here.
            change: Placement before and after; None changes nothing.
            length: How long the whole is in the dim that is split, before or after.
        """
        if change is None:
            return local
        shape = list(local.shape)
        if isinstance(change[0], Shard) and length is not None:
            shape[change[0].dim] = length
        stride = torch.empty(shape, device="meta").stride()
        crossed = DTensor.from_local(
            local.contiguous(), self.mesh, change[:1], run_check=False, shape=torch.Size(shape), stride=stride
        ).redistribute(self.mesh, change[1:])
        return crossed.to_local()


class _Cross(torch.autograd.Function):
    """A change of placement, and that of the gradient.

    Autograd sees one operation with a result of its own, not the views that `DTensor.to_local` returns: models add to
    the output of a layer in place, which such views forbid.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, crossing: Crossing, change: Any, back: Any, length: int | None = None
    ) -> Tensor:
        ctx.crossing, ctx.back, ctx.length = crossing, back, length
        if change is None:
            return local.view_as(local)
        crossed = _settled(crossing.redistribute(local.detach(), change, length))
        return crossed.clone() if crossed._is_view() or crossed.data_ptr() == local.data_ptr() else crossed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _settled(ctx.crossing.redistribute(grad, ctx.back, ctx.length)), None, None, None, None


def _settled(tensor: Tensor) -> Tensor:
    """Returns the tensor itself where a collective returned a stand-in that waits when it is used."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
