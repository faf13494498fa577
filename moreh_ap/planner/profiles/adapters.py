"""Profiles of models whose weights are frozen but for few, such as adapters (LoRA).

Decides what adapters add to a block, and how frozen weights are kept. Must not know plans, devices or libraries.

[Note: adapters]
A frozen matrix of (inner x outer) has two small ones beside it, (inner x rank) and (rank x outer). They are what gets
gradients and optimizer state. The backward still goes through the frozen matrices, for the gradients of their inputs,
but computes none of their own. Selective recomputation keeps the results of all of these products. Source: Hu et al.,
"LoRA", 2021, section 4.1; Dettmers et al., "QLoRA", 2023, section 3 (four bits a weight, and 0.127 bits of constants
after their own quantization).

A tensor axis splits the matrices of a block with adapters one by one, and gathers what each of them gives: activations
between them are whole on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moreh_ap.errors import OptionError
from moreh_ap.planner.profiles.model_profile import BYTES_PER_VALUE, Frozen, ModelProfile, Product
from moreh_ap.planner.profiles.transformer_shape import TransformerShape

__all__ = ["FROZEN_WEIGHTS", "adapters_of", "with_adapters"]

FROZEN_WEIGHTS = {
    "fp32": Frozen(4.0, 4.0),
    "bf16": Frozen(2.0, 2.0),
    "4bit": Frozen(4.0 / 8.0, 2.0, is_packed=True, constant_bytes=0.127 / 8.0),
}
"""How frozen weights may be kept, by name. Of 4 bits are the matrices of blocks; embedding and head are in bfloat16."""


def adapters_of(profile: ModelProfile, shape: TransformerShape, rank: int) -> tuple[Product, ...]:
    """Returns the products of adapters of that rank beside every matrix of a block. See [Note: adapters].

    Args:
        profile: The model without them.
        shape: Its shape.
        rank: Their rank.

    Raises:
        OptionError: The rank is not at least one.
    """
    if rank < 1:
        raise OptionError(f"adapters of rank {rank}", "a rank of at least 1", "--lora 16")
    matrices = [matrix for product in profile.block.products for matrix in _matrices_of(product, shape)]
    into = [replace(one, outer=rank, split="") for one in matrices]
    return (*into, *(replace(one, inner=rank, split="") for one in matrices))


def with_adapters(
    profile: ModelProfile, products: Sequence[Product], frozen: Frozen, first: float = 0.0, last: float = 0.0
) -> ModelProfile:
    """Returns the profile of a model with adapters, whose own weights are frozen.

    Args:
        profile: The model without them.
        products: Those of the adapters of a block.
        frozen: How the weights are kept.
        first: Parameter elements that are trained before the blocks.
        last: The same after them.
    """
    block = profile.block
    elements = sum(one.inner * one.outer * one.copies for one in products)
    results = BYTES_PER_VALUE * sum(one.outer * one.share for one in products)
    block = replace(
        block,
        parameters_replicated=block.parameters_replicated + elements,
        trained_parameters=float(elements),
        products=(*block.products, *products),
        kept_split_bytes_per_token=0.0,
        kept_replicated_bytes_per_token=block.kept_split_bytes_per_token + block.kept_replicated_bytes_per_token,
        selective_split_bytes_per_token=0.0,
        selective_replicated_bytes_per_token=(
            block.selective_split_bytes_per_token + block.selective_replicated_bytes_per_token + results
        ),
        num_kernels=block.num_kernels + 2 * len(products),
    )
    ends = replace(profile.first, trained_parameters=first), replace(profile.last, trained_parameters=last)
    return replace(profile, first=ends[0], block=block, last=ends[1], frozen=frozen)


def _matrices_of(product: Product, shape: TransformerShape) -> list[Product]:
    """Returns the matrices that a profile counts as one product: queries, keys and values; a gate and what it gates."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    values = shape.num_kv_heads * (shape.value_dim or shape.head_dim)
    widths = {queries + keys + values: (queries, keys, values), 2 * shape.ffn_hidden: (shape.ffn_hidden,) * 2}
    if product.inner != shape.hidden or product.outer not in widths:
        return [product]
    return [replace(product, outer=outer) for outer in widths[product.outer]]
