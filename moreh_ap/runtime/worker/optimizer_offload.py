"""An optimizer whose state lies in host memory between steps.

Decides when state is on the device, and how much of it at a time. Must not know messages, models, or what an optimizer
computes: it has to treat every parameter by itself, as all optimizers do that workers run.

[Note: bucket by bucket]
A step over some of the parameters is a step of the same optimizer whose groups hold only these. So the state of one
bucket is brought to the device, its parameters are stepped, and the state goes back before the next one comes. Copies
and steps are on one stream, so they happen in this order without waiting. Numbers are the same: every parameter's step
is computed from the same values on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from moreh_ap.parallelizer.data.whole_steps import from_same_settings

BUCKET_BYTES = 256 * 2**20
"""Bytes of parameters whose state is on the device at a time: far more than a copy costs to start, little for a GPU."""


class HostSlabs:
    """Pinned host memory, cut into tensors that are kept.

    PyTorch rounds pinned memory up to a power of two (c10, `CachingHostAllocator`), by a third on average. So
    it is asked for powers of two alone, which together are about what is expected.

    Args:
        expected_bytes: Of all tensors together.
        pin: Whether memory is pinned.

    Attributes:
        num_bytes: Of all slabs.
    """

    _ALIGNED, _LEAST, _MOST = 256, 1 << 20, 1 << 32

    def __init__(self, expected_bytes: int, *, pin: bool = True) -> None:
        self._expected, self._pin = expected_bytes, pin
        self._free: list[Tensor] = []
        self.num_bytes = 0

    def take(self, like: Tensor) -> Tensor:
        """Returns a tensor with shape, strides and dtype of `like`, which has no gaps."""
        wanted = like.numel() * like.element_size()
        index = next((number for number, rest in enumerate(self._free) if rest.numel() >= wanted), None)
        if index is None:
            index = len(self._free)
            self._free.append(self._slab(wanted))
        rest = self._free[index]
        used = min(rest.numel(), -(-wanted // self._ALIGNED) * self._ALIGNED)
        self._free[index] = rest[used:]
        flat = rest[:wanted].view(like.dtype)
        return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride(), flat.storage_offset())

    def _slab(self, wanted: int) -> Tensor:
        """Returns more memory: as much as is still expected, rounded down, at least `wanted` bytes."""
        still = max(self._LEAST, min(self._MOST, self._expected - self.num_bytes))
        num_bytes = max(1 << (still.bit_length() - 1), 1 << max(0, wanted - 1).bit_length())
        self.num_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin)


class OffloadedState:
    """Keeps the state of `optimizer` in host memory, pinned where the device is a GPU.

    Args:
        optimizer: Its step treats every parameter by itself; all are ordinary ones.
        bucket_bytes: Bytes of parameters that are stepped at a time.
        step: Steps the parameters that the optimizer's groups have; None: its own step.
    """

    def __init__(
        self, optimizer: Optimizer, bucket_bytes: int = BUCKET_BYTES, step: Callable[[], object] | None = None
    ) -> None:
        self._optimizer, self._step = optimizer, step or optimizer.step
        self._bucket_bytes = bucket_bytes
        self._host: dict[Tensor, dict[str, Tensor]] = {}  # where a state tensor goes, by parameter and key
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._slabs: HostSlabs | None = None

    def step(self) -> None:
        """Steps every parameter, a bucket at a time."""
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        step = from_same_settings(self._optimizer, self._step)
        try:
            for bucket in self._buckets(whole):
                for group, parameters in zip(groups, bucket, strict=True):
                    group["params"] = parameters
                now = [parameter for parameters in bucket for parameter in parameters]
                for parameter in now:
                    self.fetch(parameter)
                step()
                for parameter in now:
                    self.put_away(parameter)
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def fetch(self, parameter: Tensor) -> None:
        """Brings a parameter's state to its device, where it stays until the next step or `put_away`."""
        for tensor in self._tensors(parameter).values():
            if tensor.device != parameter.device:
                tensor.data = tensor.to(parameter.device, non_blocking=True)

    def put_away(self, parameter: Tensor) -> None:
        """Brings a parameter's state to host memory."""
        buffers = self._host.setdefault(parameter, {})
        for key, tensor in self._tensors(parameter).items():
            if tensor.device.type == "cpu":
                continue
            buffer = buffers.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = buffers[key] = self._memory(parameter).take(tensor)
            buffer.copy_(tensor, non_blocking=True)
            tensor.data = buffer

    def _memory(self, parameter: Tensor) -> HostSlabs:
        """Returns where state goes, for all of which there is room if each parameter has as much as this one."""
        if self._slabs is None:
            state_bytes = sum(one.nbytes for one in self._tensors(parameter).values())
            all_bytes = sum(one.nbytes for one in self._parameters)
            self._slabs = HostSlabs(all_bytes * state_bytes // max(1, parameter.nbytes))
        return self._slabs

    def _tensors(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns what of a parameter's state has its shape; step counts stay where the optimizer wants them."""
        state = self._optimizer.state.get(parameter) or {}
        return {
            key: value
            for key, value in state.items()
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape
        }

    def _buckets(self, groups: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
        """Yields the parameters of every group that are stepped together; no bucket is empty."""
        bucket: list[list[Tensor]] = [[] for _ in groups]
        num_bytes = 0
        for index, parameters in enumerate(groups):
            for parameter in parameters:
                bucket[index].append(parameter)
                num_bytes += parameter.nbytes
                if num_bytes >= self._bucket_bytes:
                    yield bucket
                    bucket, num_bytes = [[] for _ in groups], 0
        if any(bucket):
            yield bucket
