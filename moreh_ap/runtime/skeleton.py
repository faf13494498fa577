"""The skeleton of a model: its module tree as it travels to the workers.

The pickle of a skeleton holds no numbers of parameters and buffers, only their names, shapes and dtypes. The controller
pickles it, a worker unpickles it with its tensors on meta.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from moreh_ap.runtime.messages import TensorData


@dataclass(frozen=True)
class TensorStub:
    """A parameter or buffer inside a pickled skeleton."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool


def pickle_skeleton(module: nn.Module) -> bytes:
    """`module` without the values of its parameters and buffers; classes defined in ``__main__`` travel by value.

    Raises:
        TypeError, pickle.PicklingError: If an attribute of a submodule cannot be pickled.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    stubs = {
        id(tensor): TensorStub(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, name in parameters)
        for name, tensor in {**buffers, **parameters}.items()
    }
    buffer = io.BytesIO()
    _SkeletonPickler(buffer, stubs).dump(module)
    return buffer.getvalue()


def unpickle_skeleton(data: bytes, device: torch.device) -> nn.Module:
    """The module of a pickled skeleton with its parameters and buffers on meta; tied tensors are one object."""
    return _SkeletonUnpickler(io.BytesIO(data), device).load()


class _SkeletonPickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
    def __init__(self, file: Any, stubs: dict[int, TensorStub]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._stubs = stubs

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        stub = self._stubs.get(id(obj))
        if stub is not None:
            return stub
        # A tensor that is an ordinary attribute of a module travels with its value.
        return TensorData.of(obj.cpu(), on_device=obj.device.type != "cpu")


class _SkeletonUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, device: torch.device) -> None:
        super().__init__(file)
        self._device = device
        self._made: dict[str, Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, TensorData):
            return pid.tensor().to(self._device if pid.on_device else "cpu")
        if pid.name not in self._made:
            tensor = torch.empty(pid.shape, dtype=pid.dtype, device="meta")
            self._made[pid.name] = nn.Parameter(tensor, pid.requires_grad) if pid.is_parameter else tensor
        return self._made[pid.name]
