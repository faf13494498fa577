"""Tensors that workers keep: read, written, computed with, clipped and cleared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moreh_ap.protocol.messages.memory_files import MemoryFile
from moreh_ap.protocol.messages.tensors import StateRef, TensorData


@dataclass(frozen=True)
class ReleaseState:
    """Forget temporary tensors."""

    refs: tuple[StateRef, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor that a worker has written into a `MemoryFile`, in the order of memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class ReadState:
    """Answer whole tensors: one worker sends each, the others None in its place.

    Large ones are written into `file`, if there is one and the worker can open it, and answered as `StoredTensor`.
    """

    refs: tuple[StateRef, ...]
    file: MemoryFile | None = None


@dataclass(frozen=True)
class WriteState:
    """Set state tensors from full values; each worker keeps its shard."""

    values: dict[StateRef, TensorData]


@dataclass(frozen=True)
class KeepState:
    """Keep a state tensor under a temporary name too."""

    ref: StateRef
    output: StateRef


@dataclass(frozen=True)
class ClearGradients:
    """Set gradients to None."""

    gradients: int


@dataclass(frozen=True)
class RunOperation:
    """Run an ATen operation on state tensors, each worker on its shard; results are kept under `outputs`.

    `func` names the operator and its overload (``add_.Tensor``); the arguments have a StateRef in place of each tensor.
    """

    func: str
    arguments: Any
    keyword_arguments: Any
    outputs: tuple[StateRef, ...]


@dataclass(frozen=True)
class GradientNorm:
    """Keep the common norm of some tensors under `output`."""

    tensors: int
    norm_type: float
    output: StateRef


@dataclass(frozen=True)
class UnscaleGradients:
    """Multiply gradients by `inverse_scale`; keep under `output` 1 if one of all workers' is not finite, else `found`.

    `found` is what is known of other gradients: the number, or the name under which the workers keep it.
    """

    gradients: int
    found: StateRef | TensorData
    inverse_scale: StateRef | TensorData
    output: StateRef


@dataclass(frozen=True)
class ClipGradients:
    """Scale tensors so that a common norm of `total_norm` becomes at most `max_norm`."""

    tensors: int
    max_norm: float
    total_norm: StateRef
