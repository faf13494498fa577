"""A worker's part of an optimizer: the user's class over this worker's shards."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moreh_ap.parallelizer.state.loading import Wanted, read
from moreh_ap.parallelizer.state.state_shard import Held
from moreh_ap.protocol.messages.optimizers import BuildOptimizer
from moreh_ap.protocol.messages.tensors import SavedTensor, TensorData
from moreh_ap.runtime.worker.optimizer_offload import OffloadedState
from moreh_ap.runtime.worker.worker_device import WorkerDevice


class WorkerOptimizer:
    """The user's optimizer over this worker's shards.

    Args:
        command: The class and its defaults.
        groups: Parameters of each group, as this worker holds them; None for one that it does not hold.
        device: This worker's device.
        offload: Whether the state lies in host memory between steps.
    """

    def __init__(
        self,
        command: BuildOptimizer,
        groups: Sequence[Sequence[Held | None]],
        device: WorkerDevice,
        *,
        offload: bool = False,
    ) -> None:
        cls = pickle.loads(command.pickled_class)
        here = [[held.tensor for held in group if held is not None] for group in groups]
        self._optimizer = cls([{"params": group} for group in here], **command.defaults)
        self._parameters = [held for group in groups for held in group]
        self._device = device
        self._offloaded = OffloadedState(self._optimizer) if offload else None

    def step(self, changes: dict[int, dict[str, Any]]) -> None:
        """Take over changed hyper-parameters, then step."""
        for index, values in changes.items():
            self._optimizer.param_groups[index].update(values)
        (self._offloaded or self._optimizer).step()

    def state(self, index: int, key: str, *, fetch: bool = True) -> Held | None:
        """One tensor of the state of parameter `index`; None if the parameter is not here.

        State that lies in host memory comes to the device for it, and goes back after the next step; without `fetch` it
        is left where it is.
        """
        held = self._parameters[index]
        if held is not None and self._offloaded is not None and fetch:
            self._offloaded.fetch(held.tensor)
        return None if held is None else held.like(self._optimizer.state[held.tensor][key])

    def describe(self) -> dict[int, dict[str, Any]]:
        """The state by parameter index: a meta tensor for what is shaped like the parameter, else the value."""
        described: dict[int, dict[str, Any]] = {}
        for index, held in enumerate(self._parameters):
            entries = None if held is None else self._optimizer.state.get(held.tensor)
            if held is not None and entries:
                described[index] = {key: _describe(value, held) for key, value in entries.items()}
        return described

    def load(self, state: dict[int, dict[str, Any]]) -> None:
        """Replace the state; tensors shaped like their parameter are laid out like it."""
        self._optimizer.state.clear()
        for index, entries in state.items():
            held = self._parameters[index]
            if held is not None:
                decoded = {key: self._decode(value, held) for key, value in entries.items()}
                self._optimizer.state[held.tensor] = decoded
                if self._offloaded is not None:
                    self._offloaded.put_away(held.tensor)

    def _decode(self, value: Any, held: Held) -> Any:
        if isinstance(value, SavedTensor):
            return self._read(value, held)
        if not isinstance(value, TensorData):
            return value
        tensor = value.tensor()
        if tuple(tensor.shape) != held.shape:
            return tensor.to(self._device.torch_device) if value.on_device else tensor
        laid_out = torch.zeros_like(held.tensor, dtype=tensor.dtype, requires_grad=False)
        held.like(laid_out).write(tensor)
        return laid_out

    def _read(self, saved: SavedTensor, held: Held) -> Tensor:
        if saved.shape == held.shape:
            part = torch.zeros_like(held.tensor, dtype=saved.dtype, requires_grad=False)
            layout = held.layout
        else:
            part = torch.zeros(saved.shape, dtype=saved.dtype, device=self._device.torch_device)
            layout = None
        read(Wanted("optimizer state", part, source, layout) for source in saved.sources)
        return part


def _describe(value: Any, held: Held) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == held.tensor.shape and value.dim() > 0:
        return torch.empty(held.shape, dtype=value.dtype, device="meta")
    return value.detach().cpu()
