"""Hugging Face transformers: checkpoints that are not read by the controller, and models saved from the workers.

The only module that knows transformers' internals. It must not import transformers before the script does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from moreh_ap.integrations import transformers_worker
from moreh_ap.patching import Patches
from moreh_ap.protocol.tensor_source import TensorSource

# Source: https://github.com/huggingface/safetensors, "Format", dtype names.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Tensors(Protocol):
    """What this module needs of the virtual device's tensors."""

    def promise_from_file(self, source: TensorSource, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor whose value stays in its file until it is read."""

    def is_virtual(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of the virtual device's."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """The value of a virtual tensor as an ordinary CPU tensor."""


def install(patches: Patches, tensors: Tensors) -> None:
    """Redirect transformers, now or when the script imports it.

    Args:
        patches: The registry of this process.
        tensors: The virtual device's tensors.
    """
    reading = patches.group("Workers read the values of a checkpoint from its files, each its part.")
    saving = patches.group("The values of a model on the accelerator are on the workers.")

    def redirect(modeling: ModuleType) -> None:
        opener = LazyCheckpoint.opener(modeling.safe_open, tensors)
        reading.replace(modeling, "safe_open", opener, "Promises whole tensors of a file instead of reading them.")
        reading.replace(modeling, "caching_allocator_warmup", _leave_memory_free)
        cls = modeling.PreTrainedModel
        save = _save_from_workers(cls.save_pretrained, tensors)
        saving.replace(cls, "save_pretrained", save, "Saves a model on the accelerator as an ordinary one.")

    reading.when_imported("transformers.modeling_utils", redirect)
    transformers_worker.install(patches)


def _leave_memory_free(*args: Any, **kwargs: Any) -> None:
    """Nothing: it would allocate the checkpoint's size on a device that the controller does not have."""


class LazyCheckpoint:
    """Stands for `safetensors.safe_open`: whole tensors are promised as `InFile` values instead of being read."""

    def __init__(self, handle: Any, file: str | os.PathLike[str], tensors: Tensors) -> None:
        self._handle, self._tensors = handle, tensors
        self._file = os.path.abspath(file)  # others read it, and later, from where they are

    @staticmethod
    def opener(original: Any, tensors: Tensors) -> Callable[..., LazyCheckpoint]:
        """A replacement for `safe_open` that opens files lazily."""

        def open_lazily(filename: Any, framework: str = "pt", *args: Any, **kwargs: Any) -> Any:
            handle = original(filename, framework, *args, **kwargs)
            return LazyCheckpoint(handle, filename, tensors) if framework == "pt" else handle

        return open_lazily

    def __enter__(self) -> LazyCheckpoint:
        self._handle.__enter__()
        return self

    def __exit__(self, *exception: Any) -> Any:
        return self._handle.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def get_slice(self, key: str) -> LazySlice:
        """A tensor of the file that can be sliced (read) or taken whole (promised)."""
        return LazySlice(self._handle.get_slice(key), self._file, key, self._tensors)


class LazySlice:
    """One tensor of a checkpoint file."""

    def __init__(self, stored: Any, file: str, key: str, tensors: Tensors) -> None:
        self._stored, self._file, self._key, self._tensors = stored, file, key, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, index: Any) -> Tensor:
        dtype = _DTYPES.get(self._stored.get_dtype())
        if index is not Ellipsis or dtype is None:
            return self._stored[index]  # type: ignore[no-any-return]
        shape = tuple(self._stored.get_shape())
        return self._tensors.promise_from_file(TensorSource(self._file, self._key), shape, dtype)


def _save_from_workers(original: Callable[..., Any], tensors: Tensors) -> Callable[..., Any]:
    def save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("state_dict") is not None or not any(map(tensors.is_virtual, model.parameters())):
            return original(model, save_directory, *args, **kwargs)
        return original(model, save_directory, **{**kwargs, "state_dict": plain_state_dict(model, tensors)})

    return save_pretrained


def plain_state_dict(model: torch.nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    """The model's state dict as ordinary CPU tensors; tied tensors share their memory as they do in the model."""
    plain: dict[int, Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in plain:
            plain[id(tensor)] = tensors.to_host(tensor) if tensors.is_virtual(tensor) else tensor.detach()
        result[name] = plain[id(tensor)]
    return result
