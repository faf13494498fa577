"""Values in JSON and back: JSON's own types, and the types that schedulers, optimizers and random states need.

Decides how such a value is written. Must not know what values mean or where tensors are kept: a tensor becomes a name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moreh_ap.errors import LoadError, UnsupportedError

_ALLOWED = "None, bool, int, float, str, tensors, numpy arrays, and lists, tuples, dicts and Counters of them"


class Encoder:
    """Converts nested values to values that `json` can write.

    Attributes:
        tensors: The tensors among the values, by the names that replace them.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, place: str) -> Any:
        """Returns `value` for JSON; other types become ``{"$kind": ...}``.

        Args:
            value: The value.
            place: The path of the value: the name of a tensor, and the place that an error names.

        Raises:
            UnsupportedError: A nested value has another type.
        """
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return self._encode_tensor(value.detach(), place)
        if isinstance(value, np.ndarray):
            return {"$array": self._keep(torch.from_numpy(value.copy()), place)}
        if isinstance(value, list):
            return [self.encode(item, f"{place}/{index}") for index, item in enumerate(value)]
        if type(value) is tuple:
            return {"$tuple": self.encode(list(value), place)}
        if isinstance(value, Counter):
            return {"$counter": self._encode_items(value, place)}
        if isinstance(value, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.encode(item, f"{place}/{key}") for key, item in value.items()}
            return {"$dict": self._encode_items(value, place)}
        raise UnsupportedError(f"{place} is a {type(value).__name__}, which a checkpoint has no form for", _ALLOWED)

    def _encode_items(self, value: dict[Any, Any], place: str) -> list[Any]:
        return [[self.encode(key, place), self.encode(item, f"{place}/{key}")] for key, item in value.items()]

    def _encode_tensor(self, tensor: Tensor, place: str) -> Any:
        if tensor.dim() == 0 and not tensor.is_complex():
            return {"$scalar": self.encode(tensor.item(), place), "dtype": dtype_name(tensor.dtype)}
        return {"$tensor": self._keep(tensor, place)}

    def _keep(self, tensor: Tensor, place: str) -> str:
        self.tensors[place] = tensor
        return place


def decode(value: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """Returns the value that `Encoder.encode` was called with.

    Args:
        value: The encoded value.
        tensor_of: Returns the tensor of a name.

    Raises:
        LoadError: A ``$kind`` is unknown.
    """
    if isinstance(value, list):
        return [decode(item, tensor_of) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next((key for key in value if key.startswith("$")), None)
    if kind is None:
        return {key: decode(item, tensor_of) for key, item in value.items()}
    content = value[kind]
    if kind == "$float":
        return float(content)
    if kind == "$scalar":
        return torch.tensor(decode(content, tensor_of), dtype=dtype_of(value["dtype"]), device="cpu")
    if kind == "$tensor":
        return tensor_of(content)
    if kind == "$array":
        return tensor_of(content).numpy()
    if kind == "$tuple":
        return tuple(decode(content, tensor_of))
    if kind in ("$dict", "$counter"):
        items = {decode(key, tensor_of): decode(item, tensor_of) for key, item in content}
        return items if kind == "$dict" else Counter(items)
    raise LoadError(f"a value of the kind {kind!r} is in the checkpoint, which this version does not know")


def dtype_name(dtype: torch.dtype) -> str:
    """Returns ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a name.

    Raises:
        LoadError: PyTorch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"a tensor of the dtype {name!r} is in the checkpoint, which this PyTorch does not have")
    return dtype
