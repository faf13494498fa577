"""Values into and out of a module whose tensors may be sharded: from files, from whole tensors, to whole tensors.

Decides which shard of a tensor this worker reads or writes. Must not know where checkpoints come from, what their
tensors are called in the library that wrote them, or what the module computes.

No worker ever holds more than its own shards and one tensor on its way.

[Note: two kinds of shards]
Tensor parallelism leaves a worker an ordinary tensor, smaller than the whole; its `TensorLayout` says which ranges of
the whole it is made of. FSDP2 then shards dim 0 of that tensor as a DTensor. Either may be absent. `pieces` puts both
together: which slices of the whole are which slices of what this worker holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moreh_ap.errors import LoadError
from moreh_ap.hosts.host_files import path_here
from moreh_ap.parallelizer.data.fsdp import fsdp_modules, keeps_parameters_on_host, param_groups
from moreh_ap.parallelizer.state.tensor_layout import TensorLayout
from moreh_ap.parallelizer.surroundings.placement import on_own_device
from moreh_ap.parallelizer.tensor.split_tensor import SplitTensor
from moreh_ap.protocol.blocks import modules_aside, parameters_with_all_names
from moreh_ap.protocol.tensor_source import TensorSource as TensorSource

Piece = tuple[tuple[slice, ...], tuple[slice, ...]]
"""Slices of a whole tensor, and the slices of this worker's shard that hold them."""

HOST = torch.device("cpu")
"""Where shards lie that a plan keeps in host memory."""


@dataclass(frozen=True)
class Wanted:
    """A shard of a tensor that is to be read from a file.

    Attributes:
        name: What errors call the tensor.
        tensor: This worker's shard.
        source: Where the value, or a box of it, lies. Elements of the box that are not here are not read.
        layout: What tensor parallelism left here of the whole.
    """

    name: str
    tensor: torch.Tensor
    source: TensorSource
    layout: TensorLayout | None = None


def fill(
    module: nn.Module,
    sources: Mapping[str, TensorSource | tuple[TensorSource, ...]],
    device: torch.device | str,
    layouts: Mapping[str, TensorLayout] | None = None,
    absent: Collection[str] = (),
) -> None:
    """Gives every parameter and buffer of `module` memory and this worker's shard of its value.

    Shards of parameters that a plan keeps in host memory get memory there, everything else on `device`.

    Tensors are read one by one, each worker only its own rows of them, and cast to the dtype the module has. What
    shares one tensor (tied weights) is read once and still shares it afterwards.

    Args:
        module: A module after `apply_plan`, usually on meta. Whatever values it had are dropped.
        sources: Full name of a parameter or buffer -> where its value lies, or where the boxes lie that it is cut
            into. One name of tied ones is enough; non-persistent buffers need a source like all others.
        device: Where this worker computes.
        layouts: What tensor parallelism left of the parameters it split, by full name.
        absent: Full names of parameters that this worker does not hold: they stay on meta.

    Raises:
        LoadError: A tensor has no source, its file has no such tensor, or the shapes differ.
    """
    layouts = layouts or {}
    names = [same for same in _names_by_tensor(module) if not any(name in absent for name in same)]
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
        layout = next((layouts[name] for name in same if name in layouts), None)
        source = sources[name]
        boxes = source if isinstance(source, tuple) else (source,)
        wanted += [Wanted(name, tensors[name], box, layout) for box in boxes]
    read(wanted)


def read(wanted: Iterable[Wanted]) -> None:
    """Reads shards of tensors, only the elements that are here, and casts them to the dtype that they have here.

    Raises:
        LoadError: A file cannot be read, has no such tensor, or the shapes differ.
    """
    needed = [item for item in wanted if not item.source.start or _overlaps(item)]
    needed.sort(key=lambda item: item.source.file)
    for file, group in groupby(needed, key=lambda item: item.source.file):
        try:
            opened = safe_open(path_here(file), framework="pt")
        except (OSError, RuntimeError, SafetensorError) as error:
            raise LoadError(
                f"{file} cannot be read: {error}",
                "files that stay as they are until their values have been read",
                f"ls -l {file}",
            ) from error
        with opened:
            keys = set(opened.keys())
            for item in group:
                _read_into(opened, keys, item)


def _tensors_by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = dict(parameters_with_all_names(module))
    tensors.update(module.named_buffers(remove_duplicate=False))
    return tensors


def _names_by_tensor(module: nn.Module) -> list[list[str]]:
    """Returns the names of every tensor of the module; names of a tied tensor are in one list."""
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors_by_name(module).items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _allocate(module: nn.Module, names: list[list[str]], device: torch.device) -> None:
    """Gives the tensors of `names` memory without values, and ties again what that took apart."""
    tensors = _tensors_by_name(module)
    device_of_shards = HOST if keeps_parameters_on_host(module) else device
    to_fill = {id(tensors[same[0]]): tensors[same[0]] for same in names}
    aside, is_sharded = modules_aside(module), bool(fsdp_modules(module))
    held = set(to_fill) if is_sharded else _allocate_in_place(to_fill.values(), device)
    with torch.no_grad(), on_own_device(device):  # a library's class may make tensors where its own ones are
        module._apply(
            lambda t: (
                torch.empty_like(t, device=device_of_shards if isinstance(t, DTensor) else device)
                if id(t) in held
                else t
            )
        )
    if aside:
        now = _tensors_by_name(module)
        allocated = {id(tensor): now[name] for name, tensor in tensors.items()}
        for outside in aside:
            for own in (outside._parameters, outside._buffers):
                own.update({name: allocated.get(id(tensor), tensor) for name, tensor in own.items()})  # type: ignore[misc]
    for first, *others in names:
        tensor = _tensors_by_name(module)[first] if others else None
        for name in others:
            path, _, leaf = name.rpartition(".")
            part = module.get_submodule(path)
            held_in: dict[str, Any] = part._parameters if leaf in part._parameters else part._buffers
            held_in[leaf] = tensor  # a buffer that is a parameter, too, stays a buffer
    with torch.no_grad():
        for submodule in fsdp_modules(module):  # not by `_apply`, which a class may have replaced by one of its own
            submodule.reshard()
            for group in param_groups(submodule):
                for parameter in group.fsdp_params:
                    parameter.reset_sharded_param()  # FSDP2 looks its parameters up again


def _allocate_in_place(tensors: Iterable[torch.Tensor], device: torch.device) -> set[int]:
    """Gives tensors memory without putting others in their place, and returns the `id`s of those that stay without.

    A model may have its parameters in objects that are no modules (variables of Keras), or rely on them otherwise when
    it moves them.
    """
    left = set()
    for tensor in tensors:
        if weakref.getweakrefcount(tensor):  # PyTorch does not swap such a tensor
            left.add(id(tensor))
            continue
        made = torch.empty_like(tensor, device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        torch.utils.swap_tensors(tensor, nn.Parameter(made, tensor.requires_grad) if is_parameter else made)
    return left


def _overlaps(item: Wanted) -> list[Piece]:
    """Returns which slices of what is stored are which slices of this worker's shard."""
    found = pieces(item.tensor, item.layout)
    if not item.source.start:
        return found
    overlaps = []
    for full, own in found:
        stored, local = [], []
        for there, here, start, size in zip(full, own, item.source.start, item.source.size, strict=True):
            first, last = max(there.start, start), min(there.stop, start + size)
            stored.append(slice(first - start, last - start))
            local.append(slice(here.start + first - there.start, here.start + last - there.start))
        if all(there.start < there.stop for there in stored):
            overlaps.append((tuple(stored), tuple(local)))
    return overlaps


def _first(keys: set[str]) -> str:
    return ", ".join(sorted(keys)[:4]) + (" ..." if len(keys) > 4 else "")


def _read_into(opened: safe_open, keys: set[str], item: Wanted) -> None:
    if item.source.key not in keys:
        raise LoadError(
            f"{item.name}: {item.source.file} holds no tensor {item.source.key!r}",
            f"a key that is in the file: {_first(keys)}",
            f"ls -l {item.source.file}  # written anew since the model was made? Then make the model again",
        )
    stored = opened.get_slice(item.source.key)
    shape, wanted_shape = tuple(stored.get_shape()), item.source.size or full_shape(item.tensor, item.layout)
    if shape != wanted_shape:
        raise LoadError(
            f"{item.name}: has shape {wanted_shape}, {item.source.key!r} in {item.source.file} has {shape}",
            "a configuration and weights that belong together",
            f"ls -l {item.source.file}  # written anew since the model was made? Then make the model again",
        )
    with torch.no_grad():
        local = local_shard(item.tensor)
        for there, own in _overlaps(item):
            if own:
                local[own].copy_(stored[there])
            else:
                local.copy_(opened.get_tensor(item.source.key))


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this worker's shard of a tensor; an ordinary tensor is its own shard."""
    return tensor.to_local() if isinstance(tensor, (DTensor, SplitTensor)) else tensor


def full_shape(tensor: torch.Tensor, layout: TensorLayout | None = None) -> tuple[int, ...]:
    """Returns the shape of the full tensor of which workers hold shards."""
    return tuple(tensor.shape) if layout is None else layout.shape


def pieces(tensor: torch.Tensor, layout: TensorLayout | None = None) -> list[Piece]:
    """Returns which slices of the whole this worker holds, and where. See [Note: two kinds of shards].

    A tensor without dims has one piece with empty slices. Nothing is returned for an empty shard.
    """
    if tensor.ndim == 0:
        return [((), ())]
    sizes, starts = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if 0 in sizes:
        return []
    if layout is not None:
        return layout.pieces(range(starts[0], starts[0] + sizes[0]))
    full = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    return [(full, tuple(slice(0, size) for size in sizes))]


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole of a tensor that says itself how it is split, and any other as it is; where it is computed.

    A collective for the former.
    """
    if isinstance(tensor, DTensor):
        tensor = moved_shard(tensor, tensor.device_mesh.device_type)  # shards in host memory meet on their devices
    return tensor.full_tensor().detach() if isinstance(tensor, (DTensor, SplitTensor)) else tensor.detach()


def moved_shard(tensor: DTensor, device: torch.device | str) -> DTensor:
    """Returns the tensor with this worker's shard on another device, itself if it is there."""
    local = tensor.to_local()
    if local.device.type == torch.device(device).type:
        return tensor
    return DTensor.from_local(
        local.detach().to(device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def full_tensor(
    tensor: torch.Tensor, layout: TensorLayout | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns the whole tensor on the CPU, as a copy. A collective: every worker that holds a shard has to call it.

    Args:
        tensor: A parameter, buffer, gradient, optimizer state or output.
        layout: What tensor parallelism left here of the whole.
        group: The workers that hold the other shards; needed with `layout`.
    """
    full = whole_tensor(tensor, layout, group)
    return full.cpu().clone() if full.device.type == "cpu" else full.cpu()


def whole_tensor(
    tensor: torch.Tensor, layout: TensorLayout | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns what `full_tensor` does, but where it is computed; it is no copy if all of the tensor is here."""
    full = gathered(tensor)
    if layout is not None:
        own, full = full, torch.zeros(layout.shape, dtype=full.dtype, device=full.device)
        if layout.writes:
            for there, here in layout.pieces():
                full[there] = own[here]
        dist.all_reduce(full, group=group)
    return full


def write_tensor(tensor: torch.Tensor, full: torch.Tensor, layout: TensorLayout | None = None) -> None:
    """Writes this worker's shard of `full` into `tensor`. No collective.

    Args:
        tensor: A parameter, buffer, gradient or optimizer state, sharded or not.
        full: The full value, of the full shape, on any device and of any dtype.
        layout: What tensor parallelism left here of the whole.

    Raises:
        LoadError: The shapes differ.
    """
    if full_shape(tensor, layout) != tuple(full.shape):
        raise LoadError(
            f"a value of shape {tuple(full.shape)} for a tensor of shape {full_shape(tensor, layout)}", "equal shapes"
        )
    with torch.no_grad():
        local = local_shard(tensor)
        for there, here in pieces(tensor, layout):
            local[here].copy_(full[there])
