"""How tensors travel: as bytes, by name, or by the files they lie in."""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from moreh_ap.protocol.batch import is_shape_of_numbers
from moreh_ap.protocol.encoding import OUT_OF_BAND_MIN_BYTES
from moreh_ap.protocol.memory_format import Order, in_order
from moreh_ap.protocol.tensor_source import TensorSource

MAX_INLINE_BYTES = 16 * 1024
"""Bytes up to which a result is sent with the answer, as a loss is; logits stay on the workers until they are read."""


THREADS_PAY_BYTES = 4 << 20
"""Smallest number of bytes that PyTorch copies. PyTorch wakes a thread for each core, which takes longer than a small
copy, most of all while another process uses these cores; so fewer bytes are copied by the calling thread."""


class StateRef(NamedTuple):
    """Names a tensor that workers keep: ``("model0", "param", "head.weight")``, ``("optimizer0", "3", "exp_avg")``."""

    owner: str
    kind: str
    name: str


class LentBytes(np.ndarray[Any, Any]):
    """The memory of a tensor that the script may change; implements `shared_memory.Lent`."""

    def write_to(self, memory: mmap.mmap, start: int) -> None:
        """Copies all into a mapped file, from `start`."""
        if self.nbytes < THREADS_PAY_BYTES:
            np.frombuffer(memory, np.uint8, self.nbytes, start)[:] = self
            return
        with torch._C.DisableTorchFunction():
            target = torch.frombuffer(memory, dtype=torch.uint8, count=self.nbytes, offset=start)
            target.copy_(torch.from_numpy(self))


@dataclass(frozen=True)
class TensorData:
    """A whole tensor as bytes, in the order of memory. `on_device`: put it on the worker's device, not in host memory.

    What has no strides (a sparse tensor) is in PyTorch's own format.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    data: bytes  # or a view of some, or `LentBytes`
    on_device: bool = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Large values travel beside the pickle, where the engine does not copy them."""
        if protocol < 5 or len(self.data) < OUT_OF_BAND_MIN_BYTES:
            return super().__reduce_ex__(protocol)
        data: Any = pickle.PickleBuffer(self.data)
        return TensorData, (self.dtype, self.shape, self.strides, data, self.on_device)

    @staticmethod
    def of(tensor: Tensor, on_device: bool = True, lend: bool = False) -> TensorData:
        """Encode a CPU tensor of any dtype, strides and layout. Later changes of the tensor do not matter.

        lend: For a command that is sent before the script goes on, so that a large tensor is not copied here. Whoever
        keeps the command after it was sent keeps what `owned` returns.
        """
        with torch._C.DisableTorchFunction():  # the tensor as it is: ten calls that no mode has to look at
            if tensor.layout is not torch.strided:
                buffer = io.BytesIO()
                torch.save(tensor.detach(), buffer)
                return TensorData(tensor.dtype, tuple(tensor.shape), None, buffer.getvalue(), on_device)
            tensor = tensor.detach()
            is_dense = tensor.is_contiguous() or _is_dense(tensor.shape, tensor.stride())
            dense = tensor if is_dense else tensor.clone(memory_format=torch.preserve_format)
            flat = dense.as_strided((dense.numel(),), (1,))  # one element may have another stride
            array = flat.view(torch.uint8).numpy()
            data: Any = array.view(LentBytes) if lend and array.nbytes >= OUT_OF_BAND_MIN_BYTES else array.tobytes()
            return TensorData(tensor.dtype, tuple(dense.shape), dense.stride(), data, on_device)

    def owned(self) -> TensorData:
        """Return the same with bytes that do not change."""
        return self if isinstance(self.data, bytes) else replace(self, data=bytes(self.data))

    def tensor(self, pin: bool = False) -> Tensor:
        """Decode into a CPU tensor that owns its memory, in one copy; `pin`: into memory from which a GPU reads."""
        if self.strides is None:
            loaded: Tensor = torch.load(io.BytesIO(self.data), weights_only=True)
            return loaded
        num_bytes = len(self.data)
        if not num_bytes:  # frombuffer refuses an empty buffer
            return torch.empty(self.shape, dtype=self.dtype)
        if not pin and num_bytes < OUT_OF_BAND_MIN_BYTES:
            return torch.frombuffer(bytearray(self.data), dtype=self.dtype).as_strided(self.shape, self.strides)
        # PyTorch makes no tensor of read-only memory, so the source, which is only read, is made of the address. The
        # caching allocator of pinned memory waits for reads of the device.
        address = np.frombuffer(self.data, np.uint8).__array_interface__["data"][0]
        source = torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)
        copied = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
        if num_bytes < THREADS_PAY_BYTES:
            ctypes.memmove(copied.data_ptr(), address, num_bytes)
        else:
            copied.copy_(source)
        return copied.view(self.dtype).as_strided(self.shape, self.strides)

    def rows(self, start: int, stop: int) -> TensorData | None:
        """Return rows ``start:stop`` of dim 0 without a copy; None where they do not lie one after another."""
        if self.strides is None or not self.shape or not _has_rows_in_order(self.shape, self.strides):
            return None
        row_bytes = len(self.data) // max(1, self.shape[0])
        data: Any = memoryview(self.data)[start * row_bytes : stop * row_bytes]
        return TensorData(self.dtype, (stop - start, *self.shape[1:]), self.strides, data, self.on_device)

    def on(self, device: torch.device) -> Tensor:
        """Decode onto a worker's device, or into host memory where the script passed the tensor from there."""
        if not self.on_device or device.type == "cpu":
            return self.tensor()
        # From other memory the copy would wait for the device's queue.
        return self.tensor(pin=True).to(device, non_blocking=True)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements lie one after another in some order of the dims, as for channels_last."""
    step = 1
    for stride, size in sorted(zip(strides, shape)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def _has_rows_in_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether dim 0 of a dense tensor is the outermost one in memory."""
    return shape[0] <= 1 or strides[0] * shape[0] == math.prod(shape)


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor that lies in files, in boxes; each worker reads what it holds of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[TensorSource, ...]


@dataclass(frozen=True)
class OutputRef:
    """An output of an earlier call that was left on the workers, each holding its rows."""

    call_id: int
    index: int


@dataclass(frozen=True)
class RowShardRef:
    """A row-sharded tensor on the workers, or a large one of which each worker holds a full copy."""

    number: int


class ArrivedTensors:
    """The tensor inputs of a call on a worker, decoded when asked for: whole, or the worker's rows alone.

    Args:
        data: How each travelled.
        decode: Decodes one as a whole.
        device: Where rows are decoded to.
    """

    def __init__(
        self,
        data: Sequence[TensorData | OutputRef | StateRef],
        decode: Callable[[TensorData | OutputRef | StateRef], Tensor],
        device: torch.device,
    ) -> None:
        self._data, self._decode, self._device = data, decode, device
        self._decoded: dict[int, Tensor] = {}

    def layouts(self) -> list[tuple[tuple[int, ...], torch.dtype, object]]:
        """Return shape, dtype and strides of each; what has no strides has False in their place."""
        return [self._layout(index, one) for index, one in enumerate(self._data)]

    def numbers(self, rows: int | None) -> tuple[str, ...]:
        """Return the values of those that are a few numbers, such as coefficients; none are those of so many rows."""
        layouts = [(index, shape, dtype) for index, (shape, dtype, _) in enumerate(self.layouts())]
        found = [at for at, shape, dtype in layouts if shape[:1] != (rows,) and is_shape_of_numbers(shape, dtype)]
        return tuple(str(self._one(at).tolist()) for at in found)

    def whole(self) -> list[Tensor]:
        """Return all as they are on one device."""
        return [self._one(index) for index in range(len(self._data))]

    def rows(self, is_cut: Sequence[bool], start: int, stop: int) -> list[Tensor]:
        """Return rows ``start:stop`` of those that are cut, and the others whole."""
        return [self._rows(index, start, stop) if cut else self._one(index) for index, cut in enumerate(is_cut)]

    def _layout(
        self, index: int, data: TensorData | OutputRef | StateRef
    ) -> tuple[tuple[int, ...], torch.dtype, object]:
        if isinstance(data, TensorData):
            return data.shape, data.dtype, False if data.strides is None else data.strides
        tensor = self._one(index)
        return tensor.shape, tensor.dtype, tensor.layout is torch.strided and tensor.stride()

    def _rows(self, index: int, start: int, stop: int) -> Tensor:
        data = self._data[index]
        rows = data.rows(start, stop) if isinstance(data, TensorData) and index not in self._decoded else None
        return self._one(index)[start:stop] if rows is None else rows.on(self._device)

    def _one(self, index: int) -> Tensor:
        if index not in self._decoded:
            self._decoded[index] = self._decode(self._data[index])
        return self._decoded[index]


@dataclass(frozen=True)
class LocalRowsOf:
    """An operand that is sent in full, of which each worker takes its own rows."""

    full: TensorData | RowShardRef | OutputRef


@dataclass(frozen=True)
class LocalNumRows:
    """A size that counts rows: `full` over all workers, fewer on each worker."""

    full: int


@dataclass(frozen=True)
class Expanded:
    """An operand that repeats a smaller tensor."""

    tensor: TensorData | LocalRowsOf
    sizes: tuple[int | LocalNumRows, ...]


class TensorSlot:
    """Stands for a tensor among the constant leaves of a call."""


def bytes_of(tensor: Tensor, dtype: torch.dtype | None = None) -> bytes:
    """The values of a tensor, in `dtype` or its own, its dims in the usual order. Conversion takes no device memory."""
    return TensorData.of(tensor.cpu().to(dtype or tensor.dtype).contiguous()).data


def pickled_constant(value: Any) -> bytes:
    """A leaf that is no tensor, for a `LeafReply`."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return cloudpickle.dumps(value)


@dataclass(frozen=True)
class LeafReply:
    """One leaf of a forward's result on one worker.

    kind: "rows" (concatenate over workers), "share" (sum over workers), "same" (equal everywhere), "const" (`data` is a
    pickled object). `data` is None where the tensor was left on the worker, of which operations may run there if
    `is_operand`; else it is in the usual order of dims, and `order` is the one that they have on the worker. A tensor
    that is in the result twice has `same_as`, the place of the first.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    differentiable: bool
    data: bytes | None
    is_operand: bool = False
    order: Order = ()
    same_as: int | None = None

    def tensor(self) -> Tensor:
        """This worker's shard as a CPU tensor; only for a tensor whose bytes were sent."""
        assert self.dtype is not None and self.data is not None
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).reshape(self.shape)

    def joined_with(self, block: bytes, count: int) -> Tensor:
        """What `join` returns, of workers that all answered this but for the bytes, which lie one behind the other."""
        assert self.dtype is not None
        shards = torch.frombuffer(bytearray(block), dtype=self.dtype).reshape(count, *self.shape)
        full = shards.flatten(0, 1) if self.kind == "rows" else shards.sum(0)
        return in_order(full, self.order) if self.order else full

    @staticmethod
    def join(replies: Sequence[LeafReply], told: Callable[[Sequence[LeafReply]], object] | None = None) -> Tensor:
        """The tensor of which workers answered their shards, in rank order, laid out in memory as theirs.

        told: Called with the shares of a loss that is not finite.
        """
        first, *_ = replies
        if first.kind == "same":  # the first alone sends it
            full = first.tensor()
        elif first.kind == "rows":
            full = torch.cat([reply.tensor() for reply in replies])
        else:
            full = torch.stack([reply.tensor() for reply in replies]).sum(0)
            if told is not None and not full.dim() and not abs(full.item()) < math.inf:
                told(replies)
        return in_order(full, first.order) if first.order else full
