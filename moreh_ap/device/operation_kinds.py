"""Which ATen operations are special: tables of them, and how the others use memory.

Must not know how an operation is computed: that is `operations`.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import torch

aten = torch.ops.aten

ALIASES = {aten.detach.default, aten.alias.default}
# Their result depends only on shape and dtype of the first argument: `loss.backward()` calls ones_like(loss).
NEEDS_ONLY_METADATA = {
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# What they return lies in memory as their argument does, and random numbers are handed out in that order.
FOLLOWS_ORDER = {
    aten.empty_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
}
# PyTorch accepts a CPU tensor beside a CUDA tensor in these operations.
TAKES_BOTH_DEVICES = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
# Not plain: these ask for a device, or may change the shape of their first argument.
NOT_PLAIN = {aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor, aten.resize_.default}
# Arguments that an operation changes although its schema does not declare it.
WRITES_UNSAID = {aten.native_batch_norm.default: ("running_mean", "running_var")}


class Form(enum.Enum):
    """How a plain operation uses memory. See [Note: plain operations] in `operations`."""

    NEW = "its results are new tensors"
    VIEW = "its result is a view of its first argument"
    VIEWS = "its results, a list, are views of its first argument"
    IN_PLACE = "it changes its first argument, a tensor, and returns it"
    IN_PLACE_EACH = "it changes each tensor of its first argument, a list, and returns nothing"


@functools.cache
def form_of(func: Any) -> Form | None:
    """Returns the form of an operation; None if it is not a plain one."""
    if func in ALIASES or func in NEEDS_ONLY_METADATA or func in WRITES_UNSAID or func in NOT_PLAIN:
        return None
    schema, is_written = func._schema, _is_written
    if func.is_view:
        returned = ", ".join(str(value.type) for value in schema.returns)
        return {"Tensor": Form.VIEW, "List[Tensor]": Form.VIEWS}.get(returned)
    if not any(map(is_written, schema.arguments)):
        return Form.NEW if all(value.alias_info is None for value in schema.returns) else None
    first, *others = schema.arguments
    if not is_written(first) or any(map(is_written, others)) or torch.Tag.inplace_view in func.tags:
        return None
    if str(first.type) == "Tensor":
        return Form.IN_PLACE if len(schema.returns) == 1 else None
    return None if schema.returns else Form.IN_PLACE_EACH


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
