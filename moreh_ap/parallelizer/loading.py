"""Values into and out of a module whose tensors may be sharded: from files, from whole tensors, to whole tensors.

Decides which part of a tensor this worker reads or writes. Must not know where checkpoints come from, what their
tensors are called in the library that wrote them, or what the module computes.

No worker ever holds more than its own shards and one tensor on its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moreh_ap.errors import LoadError
from moreh_ap.parallelizer.apply import fsdp_modules


@dataclass(frozen=True)
class TensorSource:
    """Where the value of one tensor lies.

    Attributes:
        file: Path of a safetensors file that this worker can read.
        key: Name of the tensor in it.
    """

    file: str
    key: str


@dataclass(frozen=True)
class _Wanted:
    name: str
    tensor: torch.Tensor
    source: TensorSource


def fill(module: nn.Module, sources: Mapping[str, TensorSource], device: torch.device | str) -> None:
    """Gives every parameter and buffer of `module` memory on `device` and this worker's part of its value.

    Tensors are read one by one, each worker only its own rows of them, and cast to the dtype the module has. What
    shares one tensor (tied weights) is read once and still shares it afterwards.

    Args:
        module: A module after `apply_plan`, usually on meta. Whatever values it had are dropped.
        sources: Full name of a parameter or buffer -> where its value lies. One name of tied ones is enough;
            non-persistent buffers need a source like all others.
        device: Where this worker computes.

    Raises:
        LoadError: A tensor has no source, its file has no such tensor, or the shapes differ.
    """
    names = _names_by_tensor(module)
    missing = [same[0] for same in names if not any(name in sources for name in same)]
    if missing:
        raise LoadError(
            f"no value for {len(missing)} of {len(names)} tensors: {', '.join(missing[:8])}"
            + (" ..." if len(missing) > 8 else ""),
            "a source for every parameter and buffer",
        )
    _allocate(module, names, torch.device(device))
    tensors = _tensors_by_name(module)
    wanted = []
    for same in names:
        name = next(name for name in same if name in sources)
        wanted.append(_Wanted(name, tensors[name], sources[name]))
    wanted.sort(key=lambda w: w.source.file)
    for file, group in groupby(wanted, key=lambda w: w.source.file):
        with safe_open(file, framework="pt") as opened:
            keys = set(opened.keys())
            for item in group:
                _read_into(opened, keys, item)


def _tensors_by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    return tensors


def _names_by_tensor(module: nn.Module) -> list[list[str]]:
    """Returns the names of every tensor of the module; tied names stand in one list."""
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors_by_name(module).items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _allocate(module: nn.Module, names: list[list[str]], device: torch.device) -> None:
    """Moves the module to `device` without values, and ties again what `to_empty` took apart."""
    module.to_empty(device=device)
    for first, *others in names:
        tensor = _tensors_by_name(module)[first] if others else None
        for name in others:
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, tensor)
    for part in fsdp_modules(module):
        part._apply(lambda t: t, recurse=False)  # FSDP2 looks its parameters up again


def _read_into(opened: safe_open, keys: set[str], item: _Wanted) -> None:
    if item.source.key not in keys:
        raise LoadError(
            f"{item.name}: {item.source.file} holds no tensor {item.source.key!r}", "a key that is in the file"
        )
    stored = opened.get_slice(item.source.key)
    shape = tuple(stored.get_shape())
    if shape != tuple(item.tensor.shape):
        raise LoadError(
            f"{item.name}: has shape {tuple(item.tensor.shape)}, {item.source.key!r} in {item.source.file} has {shape}",
            "equal shapes",
        )
    with torch.no_grad():
        local = local_part(item.tensor)
        if local.numel() == 0:
            return
        part = _part(item.tensor)
        local.copy_(stored[part] if part else opened.get_tensor(item.source.key))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this worker's part of a tensor; an ordinary tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _part(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Returns which part of the whole tensor this worker holds; empty for a tensor without dims."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor on the CPU, as a copy. A collective: every worker has to call it."""
    whole = tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
    return whole.cpu().clone() if whole.device.type == "cpu" else whole.cpu()


def write_tensor(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Writes this worker's part of `whole` into `tensor`. No collective.

    Args:
        tensor: A parameter, buffer, gradient or optimizer state, sharded or not.
        whole: The whole value, of the same shape, on any device and of any dtype.

    Raises:
        LoadError: The shapes differ.
    """
    if tuple(tensor.shape) != tuple(whole.shape):
        raise LoadError(
            f"a value of shape {tuple(whole.shape)} for a tensor of shape {tuple(tensor.shape)}", "equal shapes"
        )
    with torch.no_grad():
        local = local_part(tensor)
        if local.numel() > 0:
            local.copy_(whole[_part(tensor)])
