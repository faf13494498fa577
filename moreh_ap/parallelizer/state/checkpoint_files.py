"""The file of a training checkpoint that one process writes: a safetensors file of boxes, parts of tensors.

Decides how a file is written and checked. Must not know which elements are written where (`checkpoint_shards`), how
files are described to a reader, or where they stand in a folder.

A file is written box by box: no process holds more than a few megabytes beside what it has anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

import torch
from torch import Tensor

from moreh_ap.errors import UnsupportedError
from moreh_ap.hosts.host_files import path_here

_CHUNK_BYTES = 16 * 1024 * 1024
_PARTIAL = "~"

# Source: https://github.com/huggingface/safetensors, "Format", dtype names.
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Box:
    """A box of a tensor on its way into a file.

    Attributes:
        name: The tensor's name in the checkpoint.
        start: Where the box begins in the whole tensor, dim by dim.
        size: How long it is, dim by dim.
        dtype: Its dtype.
        value: Gives its elements, on any device; called when it is their turn to be written.
    """

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    value: Callable[[], Tensor]

    @classmethod
    def of(cls, name: str, like: Tensor, value: Callable[[], Tensor]) -> Box:
        """Returns all of a tensor as one box."""
        return cls(name, (0,) * like.dim(), tuple(like.shape), like.dtype, value)

    @property
    def key(self) -> str:
        """Name of the box in its file; no two boxes of one tensor have the same."""
        ranges = (f"{start}:{start + size}" for start, size in zip(self.start, self.size, strict=True))
        return f"{self.name}[{','.join(ranges)}]"

    @property
    def num_bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenBox:
    """Where a box of a tensor was written: see `Box`."""

    name: str
    key: str
    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class WrittenFile:
    """A file that a worker has written.

    Attributes:
        path: The file.
        num_bytes: Its size.
        sha256: Its checksum, in hexadecimal digits.
        boxes: What is in it.
        failure: Why it could not be written; empty if it was.
    """

    path: str
    num_bytes: int
    sha256: str
    boxes: tuple[WrittenBox, ...]
    failure: str = ""


def write_file(path: str, boxes: Iterable[Box]) -> WrittenFile | None:
    """Writes boxes into a safetensors file that is on the disk when this returns; without boxes, no file.

    It has another name until it is complete, so that a file of this name stays one if the same is written again.

    Args:
        path: The file.
        boxes: What to write; `check_dtype` has accepted the dtypes.

    Returns:
        What was written, or the reason if the system refused (a full disk): one worker's trouble is no reason to end
        a training run.
    """
    boxes = list(boxes)
    if not boxes:
        return None
    header, partial = _header(boxes), path + _PARTIAL
    try:
        with open(partial, "wb") as file:
            digest = _Digest(file)
            digest.write(header)
            for box in boxes:
                for chunk in _chunks(box.value().detach()):
                    digest.write(chunk.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)  # on a full disk others need the room
        if not isinstance(error, OSError):
            raise
        return WrittenFile(path, 0, "", (), f"{type(error).__name__}: {error}")
    written = tuple(WrittenBox(box.name, box.key, box.start, box.size) for box in boxes)
    return WrittenFile(path, digest.num_bytes, digest.sha256, written)


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuses a dtype that safetensors files have no name for.

    Raises:
        UnsupportedError: They have none.
    """
    if dtype not in _DTYPE_NAMES:
        raise UnsupportedError(
            f"{name} has the dtype {dtype}, which a safetensors file cannot hold",
            ", ".join(str(known) for known in _DTYPE_NAMES),
        )


def problem_with(path: str, num_bytes: int, sha256: str | None) -> str:
    """Returns what is wrong with a file of a checkpoint; nothing if it has this size and, if one is given, checksum."""
    path = path_here(path)
    try:
        found_bytes = os.stat(path).st_size
        if found_bytes != num_bytes:
            return f"it has {found_bytes} bytes, {num_bytes} were written"
        if sha256 is None:
            return ""
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return "" if digest.hexdigest() == sha256 else "its contents are not what was written: the checksum differs"


class _Digest:
    """Writes to a file and counts and hashes what it writes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self.num_bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        self._file.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def _header(boxes: list[Box]) -> bytes:
    """Returns the beginning of a safetensors file. Source: https://github.com/huggingface/safetensors, "Format"."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for box in boxes:
        end = offset + box.num_bytes
        entries[box.key] = {"dtype": _DTYPE_NAMES[box.dtype], "shape": box.size, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensor's rows in order, a few megabytes at a time, contiguous in host memory."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        yield tensor.cpu()
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    for rows in tensor.split(max(1, _CHUNK_BYTES // row_bytes)):
        yield rows.cpu().contiguous()
