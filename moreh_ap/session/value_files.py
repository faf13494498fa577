"""Values of the controller for the workers, in files of which each worker reads its shards.

Values in the controller are written once to a temporary safetensors file, so that workers have one kind of source.
Values in a checkpoint file are read from that file.
"""

from __future__ import annotations

import os
import tempfile

from torch import Tensor

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.values import InFile
from moreh_ap.protocol.tensor_source import TensorSource

_MAX_FILE_BYTES = 1 << 30


class ValueFiles:
    """Writes values of the controller to temporary files for the workers, and removes these files."""

    def __init__(self) -> None:
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def sources_of(self, tensors: dict[str, VirtualTensor]) -> dict[str, tuple[TensorSource, ...]]:
        """Returns the files of each tensor by its name; tensors that are not in a file yet are written to one."""
        sources: dict[str, tuple[TensorSource, ...]] = {}
        pending: dict[str, Tensor] = {}
        pending_bytes = 0
        for name, tensor in tensors.items():
            value = tensor._cell.value
            if isinstance(value, InFile):
                sources[name] = value.sources
                continue
            host = value.read().detach()
            if pending_bytes + host.nbytes > _MAX_FILE_BYTES and pending:
                sources.update(self._write(pending))
                pending, pending_bytes = {}, 0
            pending[name] = host.contiguous() if host._base is None else host.clone()
            pending_bytes += host.nbytes
        if pending:
            sources.update(self._write(pending))
        return sources

    def _write(self, tensors: dict[str, Tensor]) -> dict[str, tuple[TensorSource, ...]]:
        from safetensors.torch import save_file

        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="moreh_ap_")
        file = os.path.join(self._directory.name, f"{len(os.listdir(self._directory.name))}.safetensors")
        # Two names may share one storage (a buffer that is a view): safetensors needs a storage for each tensor.
        seen: set[int] = set()
        whole: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            pointer = tensor.untyped_storage().data_ptr()
            whole[name] = tensor.clone() if pointer in seen else tensor
            seen.add(pointer)
        save_file(whole, file)
        return {name: (TensorSource(file, name),) for name in tensors}

    def remove(self) -> None:
        """Deletes the files; workers that have read them keep the values."""
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
