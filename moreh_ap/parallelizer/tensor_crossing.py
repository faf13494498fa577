"""How activations cross the tensor axis: between tensors that are whole on every rank and tensors that are parts.

Decides which collective a crossing takes, forward and backward. Must not know models, layers or parameters.

[Note: gradients at a crossing]
Three states, as in DTensor: *replicated* (every rank has the whole), *split* (every rank has a part along a dim) and
*partial* (the whole is the sum over ranks). Outside of split regions values and gradients are replicated. Inside, a
replicated value has partial gradients, since every rank sees only what its part of the layer makes of it; summing them
is the business of the crossing that led in. All crossings are DTensor redistributions, which do forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from moreh_ap.parallelizer.layout import part_of


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

    def enter(self, whole: Tensor) -> Tensor:
        """Replicated -> replicated with partial gradients. Backward: all-reduce. For weights too."""
        if not (torch.is_grad_enabled() and whole.requires_grad):
            return whole
        return DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

    def leave(self, partial: Tensor) -> Tensor:
        """Partial -> replicated: all-reduce. Backward: nothing."""
        crossed = DTensor.from_local(partial, self.mesh, [Partial()], run_check=False)
        return _settled(crossed.redistribute(self.mesh, [Replicate()]).to_local())

    def gather(self, part: Tensor, dim: int, length: int) -> Tensor:
        """Split along `dim` -> replicated: all-gather. Backward: takes this rank's part."""
        crossed = self._split(part, dim, length).redistribute(self.mesh, [Replicate()])
        return _settled(crossed.to_local())

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Replicated -> split along `dim`: nothing. Backward: all-gather."""
        crossed = DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False)
        return crossed.redistribute(self.mesh, [Shard(dim % whole.ndim)]).to_local()

    def gather_into(self, part: Tensor, dim: int, length: int) -> Tensor:
        """Split along `dim` -> replicated with partial gradients: all-gather. Backward: reduce-scatter."""
        crossed = self._split(part, dim, length).redistribute(self.mesh, [Replicate()])
        return _settled(crossed.to_local(grad_placements=[Partial()]))

    def leave_split(self, partial: Tensor, dim: int) -> Tensor:
        """Partial -> split along `dim`: reduce-scatter. Backward: all-gather."""
        crossed = DTensor.from_local(partial, self.mesh, [Partial()], run_check=False)
        return _settled(crossed.redistribute(self.mesh, [Shard(dim % partial.ndim)]).to_local())

    def part_of(self, length: int) -> tuple[int, int]:
        """Returns the range that this rank has of `length` elements."""
        return part_of(length, self.size, self.rank)

    def _split(self, part: Tensor, dim: int, length: int) -> DTensor:
        dim %= part.ndim
        shape = torch.Size((*part.shape[:dim], length, *part.shape[dim + 1 :]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part.contiguous(), self.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
        )


def _settled(tensor: Tensor) -> Tensor:
    """Returns the tensor itself where a collective returned a stand-in that waits when it is used."""
    wait = getattr(tensor, "wait", None)
    return wait() if wait is not None else tensor
