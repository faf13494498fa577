"""The planner's profile of a script's model whose weights are frozen but for few, such as adapters.

Decides which of a model's parts the trained parameters belong to, and how frozen weights are kept. Must not know plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import nn

from moreh_ap.planner.profiles.adapters import with_adapters
from moreh_ap.planner.profiles.model_profile import Frozen, ModelProfile, Product
from moreh_ap.protocol.blocks import block_lists
from moreh_ap.session.planning.packed_weights import constant_bytes, is_packed, num_values, stored_bytes

_FROZEN = 0.9
"""Fraction of frozen parameters from which on a model counts as frozen. LoRA freezes more than 95 per cent; a model
with fewer frozen parameters counts as fully trained."""


def trains_weights(root: nn.Module) -> bool:
    """Returns False for a model whose weights are frozen except for adapters."""
    sizes = [(num_values(parameter), parameter.requires_grad) for parameter in root.parameters()]
    frozen = sum(size for size, trained in sizes if not trained)
    return not 0 < frozen >= _FROZEN * sum(size for size, _ in sizes)


def with_frozen_weights(profile: ModelProfile, root: nn.Module, *, is_shape: bool) -> ModelProfile:
    """Returns the profile of a model whose weights are frozen but for few.

    Args:
        profile: The model as if all of it were trained.
        root: The model.
        is_shape: Whether the profile is that of a decoder's configuration, which knows no adapters.
    """
    blocks = max(block_lists(root).values(), key=lambda one: sum(map(_elements, one)), default=[])
    of_blocks = {id(one): one for block in blocks for one in block.parameters()}
    tables = [one for one in root.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
    of_tables = {id(one) for table in tables for one in table.parameters()} - set(of_blocks)
    outside = [one for one in root.parameters() if id(one) not in of_blocks]
    packed = any(map(is_packed, of_blocks.values()))
    frozen = Frozen(
        _bytes_of(of_blocks.values(), stored_bytes) or 4.0,
        _bytes_of(outside, stored_bytes) or 4.0,
        packed,
        _bytes_of(of_blocks.values(), constant_bytes),
    )
    trained = [one for one in of_blocks.values() if one.requires_grad]
    first = float(sum(one.numel() for one in outside if one.requires_grad and id(one) in of_tables))
    last = float(sum(one.numel() for one in outside if one.requires_grad and id(one) not in of_tables))
    if is_shape:
        sizes = Counter((one.shape[1], one.shape[0]) for one in trained if one.dim() == 2)
        # How often a block has them is said by the share of tokens, and how many there are by the copies.
        products = [
            Product(inner, outer, share=number / len(blocks), copies=number / len(blocks))
            for (inner, outer), number in sizes.items()
        ]
        return with_adapters(profile, products, frozen, first, last)
    within = sum(one.numel() for one in trained)
    if not blocks:
        return replace(profile, block=replace(profile.block, trained_parameters=first + last), frozen=frozen)
    return replace(
        profile,
        first=replace(profile.first, trained_parameters=first),
        block=replace(profile.block, trained_parameters=within / len(blocks)),
        last=replace(profile.last, trained_parameters=last),
        frozen=frozen,
    )


def _elements(module: nn.Module) -> int:
    return sum(map(num_values, module.parameters()))


def _bytes_of(parameters: Iterable[nn.Parameter], bytes_of: Callable[[nn.Parameter], int]) -> float:
    """Returns the bytes of each value of the frozen parameters, on average; 0 if there are none."""
    frozen = [one for one in parameters if not one.requires_grad]
    return sum(map(bytes_of, frozen)) / max(1, sum(map(num_values, frozen)))
