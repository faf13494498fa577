"""Objects of a worker as bytes: a description, and the memory of tensors beside it.

Decides what is named and not copied (models, their modules and parameters, process groups and meshes, which another
worker makes anew), and that tensors which share memory go on sharing it. Must not know which objects belong to a copy.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moreh_ap.parallelizer.state.loading import local_shard
from moreh_ap.parallelizer.tensor.split_tensor import SplitTensor
from moreh_ap.runtime.worker.worker_model import WorkerModel

Name = tuple[str, ...]


class _Memory(NamedTuple):
    """Stands for the memory of tensors: which of those in the description."""

    number: int


def names_of(models: Mapping[str, WorkerModel]) -> dict[Name, Any]:
    """Returns what another worker with the same models has too, by name."""
    found: dict[Name, Any] = {}
    for owner, model in models.items():
        found["model", owner] = model
        found["mesh", owner] = model.mesh
        found.update({("module", owner, path): module for path, module in model.module.named_modules()})
        found.update({("parameter", owner, name): parameter for name, parameter in model.parameters.items()})
        position = model.applied.position
        found["position", owner] = position
        for field in fields(position):
            axis = getattr(position, field.name)
            found["axis", owner, field.name] = axis
            if axis.group is not None:
                found["group", owner, field.name] = axis.group
    return found


def kept_in_place(models: Mapping[str, WorkerModel]) -> dict[Name, Tensor]:
    """Returns the tensors whose values are written where another worker has them already."""
    found: dict[Name, Tensor] = {}
    for owner, model in models.items():
        found.update({("parameter", owner, name): local_shard(one.detach()) for name, one in model.parameters.items()})
        found.update({("buffer", owner, name): buffer for name, buffer in model.module.named_buffers()})
    return {name: tensor for name, tensor in found.items() if not tensor.is_meta}


class StatePickler(pickle.Pickler):
    """Pickles objects of a worker.

    Args:
        file: Where the pickle goes.
        named: What is only named.
        first: Tensors whose memory comes first, by names under which it is found.

    Attributes:
        memory: All memory that is to be copied, as flat tensors of bytes.
        place_of: Which of it has the values of each tensor of `first`.
    """

    def __init__(self, file: io.BytesIO, named: Mapping[Name, Any], first: Mapping[Name, Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._name_of = {id(one): name for name, one in named.items()}
        self._models = [one for one in named.values() if isinstance(one, WorkerModel)]
        self.memory: list[Tensor] = []
        self._index_of: dict[Any, int] = {}
        self._kept: list[Any] = []  # what `id` and addresses are of stays alive
        self.place_of = {name: self._memory_of(tensor).number for name, tensor in first.items()}

    def persistent_id(self, obj: Any) -> Any:
        """Called for each object: what is only named has a name."""
        if type(obj) is _Memory:
            return obj.number
        return self._name_of.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        """Called for each object that is not built in.

        Raises:
            pickle.PicklingError: It cannot be copied.
        """
        if isinstance(obj, Tensor):
            return self._tensor(obj)
        if isinstance(obj, DeviceMesh):
            return self._mesh(obj)
        if isinstance(obj, (nn.Module, dist.ProcessGroup)):
            raise pickle.PicklingError(f"a {type(obj).__name__} of no model")
        if isinstance(obj, type) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"an object of the script's class {obj.__qualname__}")
        return NotImplemented

    def _tensor(self, tensor: Tensor) -> Any:
        if isinstance(tensor, DTensor):
            spec = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
            return _made_dtensor, (local_shard(tensor.detach()), *spec)
        if isinstance(tensor, SplitTensor):
            return _made_split, (tensor.local_shard, tensor.shape[tensor.split_dim], tensor.split_dim, tensor.crossing)
        kind = type(tensor)
        is_plain = kind in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise pickle.PicklingError(f"a tensor of class {kind.__name__} and layout {tensor.layout}")
        shape, strides = tuple(tensor.shape), tensor.stride()
        if tensor.is_meta:
            return _made_meta, (shape, strides, tensor.dtype)
        if tensor.untyped_storage().nbytes() == 0 and tensor.numel():
            raise pickle.PicklingError("a tensor whose memory was freed")
        needs_grad = tensor.requires_grad and tensor.is_leaf
        memory = self._memory_of(tensor)
        return _made_tensor, (memory, tensor.dtype, tensor.storage_offset(), shape, strides, needs_grad)

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes(), tensor.device
        if key not in self._index_of:
            self._kept.append(storage)
            self._index_of[key] = len(self.memory)
            self.memory.append(flat_memory(tensor))
        return _Memory(self._index_of[key])

    def _mesh(self, mesh: DeviceMesh) -> Any:
        names = mesh.mesh_dim_names or ()
        for model in self._models:
            whole = model.mesh
            if set(names) <= set(whole.mesh_dim_names or ()) and torch.equal(whole[names].mesh, mesh.mesh):
                return _made_mesh, (model, names)
        raise pickle.PicklingError(f"a mesh of axes {names}")


class StateUnpickler(pickle.Unpickler):
    """Builds the objects again on another worker.

    Args:
        description: The pickle.
        named: What is only named there.
        memory: Returns the memory of a number, which may be that of a parameter.
        is_of_another_plan: Whether tensors are not to be used as they are: what was sharded comes as the ordinary
            tensor that a worker had of it, and none has memory of its own.
    """

    def __init__(
        self,
        description: bytes,
        named: Mapping[Name, Any],
        memory: Callable[[int], Tensor],
        *,
        is_of_another_plan: bool = False,
    ) -> None:
        super().__init__(io.BytesIO(description))
        self._named, self._memory = named, memory
        self._otherwise = _UNDER_ANOTHER_PLAN if is_of_another_plan else {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Called for each class and function that the pickle names."""
        found = super().find_class(module_name, global_name)
        return self._otherwise.get(found, found) if self._otherwise and module_name == __name__ else found

    def persistent_load(self, name: Any) -> Any:
        if isinstance(name, int):
            return self._memory(name)
        return self._named.get(name) if self._otherwise else self._named[name]  # another plan has other groups


def flat_memory(tensor: Tensor) -> Tensor:
    """Returns all memory behind a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def seen_in(memory: Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Returns the tensor that lies in flat memory, which may begin anywhere in a larger one."""
    typed = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return typed.as_strided(tuple(shape), tuple(strides), typed.storage_offset() + offset)


def _made_tensor(
    memory: Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], strides: Sequence[int], needs_grad: bool
) -> Tensor:
    made = torch.empty(0, dtype=dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), offset, shape, strides).requires_grad_(needs_grad)


def _made_meta(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _made_dtensor(local: Tensor, mesh: DeviceMesh, placements: Any, shape: Any, strides: Any) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)


def _made_split(local: Tensor, size: int, dim: int, crossing: Any) -> SplitTensor:
    return SplitTensor(local, size, dim, crossing)


def _made_mesh(model: WorkerModel, names: tuple[str, ...]) -> DeviceMesh:
    return model.mesh[names]


def _seen_tensor(
    memory: Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], strides: Sequence[int], needs_grad: bool
) -> Tensor:
    return seen_in(memory, dtype, offset, shape, strides)


def _local_part(local: Tensor, *of_whole: Any) -> Tensor:
    return local


def _no_mesh(model: WorkerModel, names: tuple[str, ...]) -> None:
    """A mesh of the plan that is no more."""


_UNDER_ANOTHER_PLAN: Mapping[Any, Any] = {
    _made_tensor: _seen_tensor,
    _made_dtensor: _local_part,
    _made_split: _local_part,
    _made_mesh: _no_mesh,
}
