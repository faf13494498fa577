"""A tensor of which this worker holds a shard, with what is needed to make it full again.

Decides which worker's copy counts and who sends a full tensor. Must not know names of tensors or messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from moreh_ap.parallelizer.mesh import Axis, Position
from moreh_ap.parallelizer.state.loading import full_shape, full_tensor, local_shard, whole_tensor, write_tensor
from moreh_ap.parallelizer.state.tensor_layout import TensorLayout


@dataclass(frozen=True)
class StateShard:
    """This worker's shard of a tensor.

    Attributes:
        tensor: The shard: an ordinary tensor, or FSDP2's shard of one.
        position: This worker's position in the mesh of the plan that the tensor belongs to.
        layout: What tensor parallelism left here of the full; None if that is all of it.
        is_first: Whether this worker's stage is the first that holds the tensor.
    """

    tensor: Tensor
    position: Position
    layout: TensorLayout | None = None
    is_first: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return full_shape(self.tensor, self.layout)

    @property
    def local(self) -> Tensor:
        """The shard as an ordinary tensor."""
        return local_shard(self.tensor)

    @property
    def copies(self) -> Axis | None:
        """The workers whose copies of the shard may be used for it; None where copies of other workers are used."""
        in_tensor = self.position.tensor.rank == 0 if self.layout is None else self.layout.writes
        if not (self.is_first and in_tensor):
            return None
        return self.position.replicas if isinstance(self.tensor, DTensor) else self.position.data

    @property
    def is_canonical(self) -> bool:
        """Whether the elements of the shard count here; copies of them may be on other workers."""
        copies = self.copies
        return copies is not None and copies.rank == 0

    @property
    def is_sender(self) -> bool:
        """Whether this worker sends the full tensor to the controller."""
        return self.is_first and self.position.data.rank == 0 and self.position.tensor.rank == 0

    def full_tensor(self) -> Tensor:
        """Returns the full tensor on the CPU. A collective of all workers that hold shards of this copy."""
        return full_tensor(self.tensor, self.layout, self.position.tensor.group)

    def whole_tensor(self) -> Tensor:
        """Returns the full tensor where it is computed; no copy if all of it is here. A collective, as above."""
        return whole_tensor(self.tensor, self.layout, self.position.tensor.group)

    def write(self, full: Tensor) -> None:
        """Writes this worker's shard of `full`.

        Raises:
            LoadError: The shapes differ.
        """
        write_tensor(self.tensor, full, self.layout)

    def like(self, tensor: Tensor) -> StateShard:
        """Returns `tensor`, computed element by element from this one, as a shard of another tensor."""
        same = tuple(tensor.shape) == tuple(self.tensor.shape)
        return StateShard(tensor, self.position, self.layout if same else None, self.is_first)
