"""A worker's part of an optimizer: the user's class over this worker's shards."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moreh_ap.parallelizer.loading import write_tensor
from moreh_ap.runtime.messages import BuildOptimizer, TensorData
from moreh_ap.runtime.worker_device import WorkerDevice


class WorkerOptimizer:
    """The user's optimizer over this worker's shards.

    Args:
        command: The class and its defaults.
        groups: Parameters of each group, as this worker holds them.
    """

    def __init__(self, command: BuildOptimizer, groups: Sequence[Sequence[Tensor]], device: WorkerDevice) -> None:
        cls = pickle.loads(command.pickled_class)
        self._optimizer = cls([{"params": group} for group in groups], **command.defaults)
        self._parameters = [parameter for group in groups for parameter in group]
        self._device = device

    def step(self, changes: dict[int, dict[str, Any]]) -> None:
        """Take over changed hyper-parameters, then step."""
        for index, values in changes.items():
            self._optimizer.param_groups[index].update(values)
        self._optimizer.step()

    def state(self, index: int, key: str) -> Tensor:
        """One tensor of the state of parameter `index`."""
        tensor: Tensor = self._optimizer.state[self._parameters[index]][key]
        return tensor

    def describe(self) -> dict[int, dict[str, Any]]:
        """The state by parameter index: a meta tensor for what is shaped like the parameter, else the value."""
        described: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(self._parameters):
            entries = self._optimizer.state.get(parameter)
            if entries:
                described[index] = {key: _describe(value, parameter) for key, value in entries.items()}
        return described

    def load(self, state: dict[int, dict[str, Any]]) -> None:
        """Replace the state; tensors shaped like their parameter are laid out like it."""
        self._optimizer.state.clear()
        for index, entries in state.items():
            parameter = self._parameters[index]
            self._optimizer.state[parameter] = {key: self._decode(value, parameter) for key, value in entries.items()}

    def _decode(self, value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, TensorData):
            return value
        tensor = value.tensor()
        if tensor.shape != parameter.shape:
            return tensor.to(self._device.torch_device) if value.on_device else tensor
        laid_out = torch.zeros_like(parameter, dtype=tensor.dtype, requires_grad=False)
        write_tensor(laid_out, tensor)
        return laid_out


def _describe(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and value.dim() > 0:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value.detach().cpu()
