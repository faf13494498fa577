"""The planner's profile of a script's model, from the module itself and its first call.

Decides when a model's configuration is used, and how the model is counted otherwise. Must not know plans or devices.

[Note: counted models]
Where a model is not a decoder whose configuration gives its shape, every layer with a weight counts as one matrix
product of each position that it sees, and keeps its input and its output for the backward. Those are the positions of
the call, but for models with convolutions, whose layers' sizes are looked up (`layer_sizes.py`). Attention's scores and
what has no weight are not counted, so that such models are underestimated; what is measured in the first steps is
remembered (`step_watch.py`) and corrects it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.errors import OptionError
from moreh_ap.planner.profiles.model_profile import LayerProfile, ModelProfile, Product
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, from_config, profile_of
from moreh_ap.protocol.blocks import block_lists
from moreh_ap.protocol.objects.batch_items import find_items
from moreh_ap.protocol.objects.picture_rows import find_pictures
from moreh_ap.session.planning.frozen_weights import trains_weights, with_frozen_weights
from moreh_ap.session.planning.layer_sizes import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, LayerSize, layer_sizes
from moreh_ap.session.planning.loss_place import with_loss_place
from moreh_ap.session.planning.packed_weights import num_values
from moreh_ap.session.verification import reduced_model

_NEAR = 0.02
"""Part of a model's parameters by which the count from its configuration may be off."""

_KERNELS = 4
"""Kernels for each layer with its surroundings: a product, a norm, an activation, a sum."""


def identity_of(root: nn.Module, call: Any) -> str:
    """Returns by what a model and its batch are recognised in another run: class, parameters, shape of the batch.

    Args:
        root: The model.
        call: Positional and keyword arguments of a call.
    """
    with torch._C.DisableTorchFunction():
        size = sum(parameter.numel() for parameter in root.parameters())
        tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    shape = tuple(tensors[0].shape) if tensors else ()
    return f"{type(root).__name__}, {size} parameters, {shape}"


def shape_of(root: nn.Module) -> TransformerShape | None:
    """Returns the shape of a decoder of transformers with its head, adapters or not; None for every other model."""
    describe = getattr(getattr(root, "config", None), "to_dict", None)
    if describe is None or not reduced_model.is_of_libraries(root, but_for_adapters=True):
        return None
    try:
        shape = from_config(describe(), type(root).__name__)
    except OptionError:
        return None
    found = sum(map(num_values, root.parameters()))
    return shape if abs(shape.parameters - found) <= _NEAR * found else None


def profile_model(
    root: nn.Module, shape: TransformerShape | None, call: tuple[nn.Module, Any, Any], rows: int
) -> ModelProfile:
    """Returns the cost of a model for rows like those of a call.

    Args:
        root: The model.
        shape: The result of `shape_of`.
        call: Module, positional and keyword arguments of the first call; only the shapes of tensors are used.
        rows: Rows of the call.
    """
    tensors = [leaf for leaf in tree_leaves(call[1:]) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    positions = positions_of(tensors)
    if shape is not None:
        profile = profile_of(shape, positions)
    else:
        profile = _counted(root, positions, _Seen(layer_sizes(root, *call), root, rows * positions))
    profile = with_loss_place(profile, root, call, takes_labels=shape is not None)
    return profile if trains_weights(root) else with_frozen_weights(profile, root, is_shape=shape is not None)


def positions_of(tensors: list[Tensor]) -> int:
    """Returns how many positions a row has: of a sequence of ids or vectors, or the pixels of a picture."""
    first = tensors[0] if tensors else None
    if first is None or first.dim() < 2 or (first.is_floating_point() and first.dim() == 2):
        return 1
    if first.dim() >= 4:
        return math.prod(first.shape[2:])
    return int(first.shape[1])


def _counted(root: nn.Module, positions: int, seen: _Seen) -> ModelProfile:
    """See [Note: counted models]."""
    lists = sorted(block_lists(root).values(), key=_elements)
    blocks = lists[-1] if lists else []
    inside = {id(module) for block in blocks for module in block.modules()}
    rest = [module for module in root.modules() if id(module) not in inside]
    tables = [module for module in rest if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    others = [module for module in rest if module not in tables]
    owned = {id(p) for module in [*tables, *blocks] for p in module.parameters()}
    body = (
        _segment_profile([m for block in blocks for m in block.modules()], set(), len(blocks), seen)
        if blocks
        else LayerProfile()
    )
    first = LayerProfile(parameters_replicated=float(_elements(tables)), num_kernels=_KERNELS)
    last = _segment_profile(others, owned, 1, seen)
    if not blocks:  # one segment without a cut
        body, last = last, LayerProfile()
    heads = [module.out_features for module in others if isinstance(module, nn.Linear)]
    return ModelProfile(
        name=type(root).__name__,
        sequence_length=positions,
        hidden=seen.width_after(blocks[0] if blocks else root)
        or max((module.embedding_dim for module in tables), default=0)
        or max(heads, default=1),
        num_blocks=max(1, len(blocks)),
        first=first,
        block=body,
        last=last,
        logits_per_token=max(heads, default=0) if tables else 0,
    )


class _Seen:
    """How many positions layers see, and the elements they keep.

    Args:
        sizes: By ``id`` of the module.
        root: The model.
        num_positions: Positions of all rows of the call.
    """

    def __init__(self, sizes: dict[int, LayerSize], root: nn.Module, num_positions: int) -> None:
        self._sizes, self._num_positions = sizes, num_positions
        # A layer that is not called itself, since the module around it uses its weight, sees what that module sees.
        around = {id(child): module for module in root.modules() for child in module.children()}
        for module in root.modules() if sizes else ():
            if id(module) not in sizes and id(around.get(id(module))) in sizes:
                sizes[id(module)] = sizes[id(around[id(module)])]

    def share(self, module: nn.Module, matrix: Tensor) -> float:
        """Returns the positions for which a layer multiplies with this weight, for each position of the call."""
        size = self._sizes.get(id(module))
        if size is None:
            return 1.0
        if isinstance(module, TRANSPOSED_CONVOLUTIONS):
            return size.read / matrix.shape[0] / self._num_positions
        if isinstance(module, CONVOLUTIONS):
            return size.written / matrix.shape[0] / self._num_positions
        return size.read / matrix.shape[1] / self._num_positions

    def width_after(self, block: nn.Module) -> int:
        """Returns the elements that a block's last layer writes for each position of the call; 0 where not known."""
        known = [one for one in block.modules() if _has_matrix(one) and id(one) in self._sizes]
        written = [self._sizes[id(one)].written for one in known]
        return math.ceil(written[-1] / self._num_positions) if written else 0

    def kept(self, module: nn.Module, matrix: Tensor) -> tuple[float, float]:
        """Returns the elements of a layer's input and of its result, for each position of the call."""
        size = self._sizes.get(id(module))
        if size is None or not isinstance(module, (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS)):
            share = self.share(module, matrix)
            return share * matrix.shape[1], share * matrix.shape[0]
        return size.read / self._num_positions, size.written / self._num_positions


def _segment_profile(modules: list[nn.Module], owned_elsewhere: set[int], num_equal: int, seen: _Seen) -> LayerProfile:
    """Returns the cost of modules together, divided by `num_equal`; equal products of equal blocks are counted once."""
    parameters: dict[int, int] = {}
    shares: dict[tuple[int, int], float] = {}
    inputs = results = 0.0
    num_matrices = 0
    for module in modules:
        own = [p for p in module._parameters.values() if p is not None]
        parameters.update({id(p): num_values(p) for p in own if id(p) not in owned_elsewhere})
        matrices = [p for p in own if p.dim() >= 2]
        for matrix in matrices:
            size = (math.prod(matrix.shape[1:]), matrix.shape[0])  # a kernel's pixels are one input
            shares[size] = shares.get(size, 0.0) + seen.share(module, matrix)
            read, written = seen.kept(module, matrix)
            inputs, results, num_matrices = inputs + read, results + written, num_matrices + 1
    seen_at_all = {size: share / num_equal for size, share in shares.items() if share}  # a parametrization gets nothing
    products = tuple(Product(inner, outer, share=share) for (inner, outer), share in seen_at_all.items())
    inputs, results = 2.0 * inputs / num_equal, 2.0 * results / num_equal
    return LayerProfile(
        parameters_replicated=sum(parameters.values()) / num_equal,
        products=products,
        kept_replicated_bytes_per_token=inputs + results,
        selective_replicated_bytes_per_token=results,
        moved_replicated_bytes_per_token=2.0 * (inputs + results),
        num_kernels=max(1, round(_KERNELS * num_matrices / num_equal)),
    )


def _has_matrix(module: nn.Module) -> bool:
    return any(p is not None and p.dim() >= 2 for p in module._parameters.values())


def _elements(modules: Sequence[nn.Module]) -> int:
    return sum(num_values(p) for p in {id(p): p for module in modules for p in module.parameters()}.values())


def has_items(call: tuple[nn.Module, Any, Any], rows: int | None) -> bool:
    """Returns whether a call has items instead of rows, or several pictures of a row: `protocol/objects`.

    Args:
        call: Module, positional and keyword arguments.
        rows: Rows of the call, None if no argument has rows.
    """
    return find_pictures(*call[1:]) is not None or (rows is None and find_items(*call[1:]) is not None)


def joins_rows(root: nn.Module) -> bool:
    """Whether training calls normalise by statistics of the batch, to which every row contributes."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    # A model in evaluation mode will be trained later; in one that trains, layers in evaluation mode are frozen.
    return any(isinstance(part, kinds) and (part.training or not root.training) for part in root.modules())
