"""A tensor of which this worker holds a part, with what is needed to make it whole.

Decides which worker's copy counts and who sends a whole tensor. Must not know names of tensors or messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from moreh_ap.parallelizer.mesh import Position
from moreh_ap.parallelizer.state.loading import full_tensor, local_part, whole_shape, write_tensor
from moreh_ap.parallelizer.state.tensor_layout import TensorLayout


@dataclass(frozen=True)
class StateShard:
    """This worker's part of a tensor.

    Attributes:
        tensor: The part: an ordinary tensor, or FSDP2's shard of one.
        position: Where this worker stands in the plan that the tensor belongs to.
        layout: What tensor parallelism left here of the whole; None if that is all of it.
        is_first: Whether this worker's stage is the first that holds the tensor.
    """

    tensor: Tensor
    position: Position
    layout: TensorLayout | None = None
    is_first: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return whole_shape(self.tensor, self.layout)

    @property
    def local(self) -> Tensor:
        """The part as an ordinary tensor."""
        return local_part(self.tensor)

    @property
    def is_canonical(self) -> bool:
        """Whether the elements of the part count here; copies of them may be on other workers."""
        position = self.position
        in_data = position.holds_first_replica if isinstance(self.tensor, DTensor) else position.data.rank == 0
        in_tensor = position.tensor.rank == 0 if self.layout is None else self.layout.writes
        return self.is_first and in_data and in_tensor

    @property
    def is_sender(self) -> bool:
        """Whether this worker is the one that sends the whole tensor to whoever asked for it."""
        return self.is_first and self.position.data.rank == 0 and self.position.tensor.rank == 0

    def whole(self) -> Tensor:
        """Returns the whole tensor on the CPU. A collective of all workers that hold parts of this copy."""
        return full_tensor(self.tensor, self.layout, self.position.tensor.group)

    def write(self, whole: Tensor) -> None:
        """Writes this worker's part of `whole`.

        Raises:
            LoadError: The shapes differ.
        """
        write_tensor(self.tensor, whole, self.layout)

    def like(self, tensor: Tensor) -> StateShard:
        """Returns `tensor`, computed element by element from this one, as a part of another whole."""
        same = tuple(tensor.shape) == tuple(self.tensor.shape)
        return StateShard(tensor, self.position, self.layout if same else None, self.is_first)
