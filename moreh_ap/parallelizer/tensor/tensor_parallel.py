"""Tensor parallelism: every layer of a model split over the ranks of one mesh axis, with one-device numbers.

Decides what a caller gets of it; how each module is split is for `split_choice.py`. Must not know batches, other mesh
axes, checkpoints or the controller.

[Note: ordinary parameters]
A rank's shard of a weight is an ordinary, smaller parameter, and a `TensorLayout` says what it is of the whole. It is
not a DTensor: fused projections need pieces from several places, key-value heads may be on several ranks, FSDP2 shards
the part over the data axes as if it were the whole, and optimizers run without dispatch. Activations cross the axis
through DTensor (`crossing.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moreh_ap.errors import PlanError
from moreh_ap.parallelizer.state.tensor_layout import Range, TensorLayout
from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.parallelizer.tensor.sequence import split_sequences
from moreh_ap.parallelizer.tensor.split_choice import Splitter


@dataclass(frozen=True)
class TensorParallel:
    """The result of splitting a module over the tensor axis, on this rank.

    Attributes:
        layouts: What this rank's parameters are of the whole ones, by full name; a parameter without an entry is whole.
        decisions: How each kind of module was split, for people to read.
        cache_heads: Number of key-value heads of all ranks; None if caches are whole.
        cache_ranges: The key-value heads that this rank's caches have in dim 1 of (batch, heads, positions, width).
        cache_writes: Whether this rank contributes its heads when a whole cache is put together.
    """

    layouts: dict[str, TensorLayout]
    decisions: tuple[str, ...] = ()
    cache_heads: int | None = None
    cache_ranges: tuple[Range, ...] | None = None
    cache_writes: bool = True

    def own_heads(self, cached_BHTD: Tensor) -> Tensor:
        """Returns keys or values cut to this rank's heads; a tensor of other dims (a count of positions) as it is."""
        if self.cache_ranges is None or cached_BHTD.dim() != 4:
            return cached_BHTD
        return torch.cat([cached_BHTD[:, start:stop] for start, stop in self.cache_ranges], dim=1)

    def cache_layout(self, cached_BHTD: Tensor) -> TensorLayout | None:
        """Returns what keys or values of this rank are of those of all heads; None if they are all of them."""
        if self.cache_ranges is None or self.cache_heads is None or cached_BHTD.dim() != 4:
            return None
        shape = (cached_BHTD.shape[0], self.cache_heads, *cached_BHTD.shape[2:])
        return TensorLayout(shape, 1, self.cache_ranges, self.cache_writes)


def apply_tensor_parallel(
    module: nn.Module, group: DeviceMesh | dist.ProcessGroup, *, sequence_parallel: bool = False
) -> TensorParallel:
    """Splits `module` in place. Afterwards it is called as before, with the same arguments on every rank.

    What is still split when the module returns, as logits are, is a `SplitTensor` in its result: `full_tensor()`
    gathers it, and so does any operation that has no split form.

    Args:
        module: The whole model, on meta or with values.
        group: The tensor axis: a mesh of one dim, or a process group.
        sequence_parallel: Whether hidden states between the split layers of a block are split along the sequence.

    Raises:
        PlanError: The model cannot be split over so many ranks, or its sequences cannot be split.
    """
    mesh = group if isinstance(group, DeviceMesh) else _mesh_of(group)
    splitter = Splitter(module, Crossing(mesh))
    splitter.run()
    if sequence_parallel:
        split_sequences(module, splitter.slicer, splitter.natural, splitter.trusted)
        splitter.decisions["hidden states: split along the sequence between the split layers of a block"] = 1
    layouts = splitter.slicer.layouts()
    if not layouts:
        raise PlanError(
            f"tensor={mesh.size()} would split nothing of this {type(module).__name__}",
            "models with repeated blocks, or with linear layers one after the other",
            f'plan="replicate={mesh.size()}"',
        )
    lines = [line if count == 1 else f"{line} ({count} times)" for line, count in splitter.decisions.items()]
    return TensorParallel(layouts, tuple(lines), *splitter.cache())


def _mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    on_device = dist.get_backend(group) == "nccl"
    return DeviceMesh.from_group(group, "cuda" if on_device else "cpu")
