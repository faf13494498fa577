"""Results of forwards of some items each, put together as one device's: lists with an entry an item, rows, shares.

Decides what a result is made of, and how the workers' parts travel. Must not know what the items are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils import _pytree as pytree

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.protocol.pytree import flatten, pickle_treespec, unpickle_treespec

NODE, ITEMS, ROWS, ITEM_ROWS, SHARE, SAME = "node", "items", "rows", "item rows", "share", "same"
PACKED = "packed"


@dataclass(frozen=True)
class Merge:
    """How a part of the workers' results goes together.

    Attributes:
        kind: `ITEMS`, a list or tuple with an entry for each item; `ROWS`, tensors that follow each other along a dim;
            `ITEM_ROWS`, such tensors with a row for each item along dim 0; `PACKED`, a packed sequence;
            `SHARE`, summands; `SAME` on every worker; `NODE`, something with parts.
        parts: Of a node.
        dim: Along which rows follow each other.
    """

    kind: str
    parts: tuple[Merge, ...] = ()
    dim: int = 0


def parts_of(value: Any) -> tuple[list[Any], Any]:
    """Returns the parts of a result, one level deep, and what puts them together; of a leaf itself."""
    return pytree.tree_flatten(value, is_leaf=lambda inside: inside is not value)


def packed_together(parts: Sequence[PackedSequence]) -> PackedSequence:
    """Returns the sequences of several packed ones, packed in the same way."""
    sequences = [sequence for part in parts for sequence in unpack_sequence(part)]
    return pack_sequence(sequences, enforce_sorted=parts[0].sorted_indices is None)


class TogetherWith:
    """A worker's result, and what of it goes to the others.

    Args:
        merge: How results go together.
        result: This worker's.
        items: How many items it is of.
        row_length: Tensors with a row of this length for each item stay with their worker; None: none do.

    Attributes:
        problem: Why the result is not as was learned; empty where it is.
    """

    def __init__(self, merge: Merge, result: Any, items: int, row_length: int | None = None) -> None:
        self._merge, self._result, self._row_length = merge, result, row_length
        flatten(result)  # what nests in a way that is not known yet is taken apart from now on
        self._travels: list[Any] = []
        self.problem = ""
        self._look(merge, result, items)

    def _look(self, merge: Merge, value: Any, items: int) -> None:
        if merge.kind == NODE:
            parts, _ = parts_of(value)
            if len(parts) != len(merge.parts):
                self.problem = "items decide how the result nests"
            for inner, part in zip(merge.parts, parts):
                self._look(inner, part, items)
        elif merge.kind == ITEMS:
            if type(value) not in (list, tuple) or len(value) != items:
                self.problem = "items decide how the result nests"
            self._travels.append(value)
        elif merge.kind == PACKED:
            if not isinstance(value, PackedSequence) or int(value.batch_sizes[0]) != items:
                self.problem = "items decide how the result nests"
            self._travels.append(value)
        elif merge.kind in (ROWS, ITEM_ROWS):
            if not isinstance(value, Tensor) or not value.ndim:
                self.problem = "items decide how the result nests"
            elif not self._stays(merge, value):
                self._travels.append(value)
            elif len(value) != items:
                self.problem = "the result has not a row for each item"

    def _stays(self, merge: Merge, value: Tensor) -> bool:
        """Returns whether every worker keeps the rows of its items: logits of a vocabulary are large."""
        return merge.kind == ITEM_ROWS and self._row_length is not None and self._row_length in value.shape[1:]

    def put_together(self, axis: Axis) -> tuple[Any, list[str]]:
        """Returns one device's result, and the kind of each of its leaves. A collective."""
        everyone = gathered(self._travels, axis) if self._travels else []
        left = iter(range(len(self._travels)))
        kinds: list[str] = []

        def rebuild(merge: Merge, value: Any) -> Any:
            if merge.kind == NODE:
                parts, spec = parts_of(value)
                return pytree.tree_unflatten([rebuild(*both) for both in zip(merge.parts, parts, strict=True)], spec)
            if merge.kind == ITEM_ROWS and self._stays(merge, value):
                kinds.append("rows")
                return value
            if merge.kind in (ITEMS, ROWS, ITEM_ROWS, PACKED):
                number = next(left)
                all_parts = [of_worker[number] for of_worker in everyone]
                if merge.kind == ITEMS:
                    value = type(value)(one for part in all_parts for one in part)
                else:
                    value = packed_together(all_parts) if merge.kind == PACKED else torch.cat(all_parts, merge.dim)
            is_share = merge.kind == SHARE
            leaves, _ = flatten(value)
            kinds.extend("share" if is_share else "same" if isinstance(one, Tensor) else "const" for one in leaves)
            return value

        return rebuild(self._merge, self._result), kinds


def gathered(parts: Sequence[Any], axis: Axis) -> list[list[Any]]:
    """Returns the parts of all workers, differentiably. A collective, and so is a backward through them."""
    leaves, spec = flatten(list(parts))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
    needs = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    found: list[Any] = [None] * axis.size
    sent = pickle_treespec(spec), others, needs, [tensor.detach().cpu() for tensor in tensors]
    dist.all_gather_object(found, sent, group=axis.group)
    device = tensors[0].device if tensors else torch.device("cpu")
    everything = [tensor.to(device) for *_, theirs in found for tensor in theirs]
    if any(theirs for _, _, theirs, _ in found):
        # A worker without a gradient of its own takes part in the backward too.
        tie = torch.zeros((), requires_grad=True)
        before = sum(len(theirs) for *_, theirs in found[: axis.rank])
        everything = list(_Gathered.apply(axis, before, everything, tie, *tensors))
    values = iter(everything)
    return [
        pytree.tree_unflatten([next(values) if one is None else one[0] for one in others], unpickle_treespec(spec))
        for spec, others, _, _ in found
    ]


class _Gathered(torch.autograd.Function):
    """The tensors of all workers; the gradients of all copies are summed."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, before: int, everything: list[Tensor], tie: Tensor, *own: Tensor) -> Any:
        ctx.axis, ctx.own = axis, slice(before, before + len(own))
        ctx.mark_non_differentiable(*(tensor for tensor in everything if not tensor.is_floating_point()))
        ctx.floating = [tensor.is_floating_point() for tensor in everything]
        return tuple(everything)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sums = [grad.contiguous() for grad, is_floating in zip(grads, ctx.floating, strict=True) if is_floating]
        flat = torch.cat([grad.flatten().double() for grad in sums])
        dist.all_reduce(flat, group=ctx.axis.group)
        pieces = iter(flat.split([grad.numel() for grad in sums]))
        found = [
            next(pieces).view(grad.shape).to(grad.dtype) if is_floating else None
            for grad, is_floating in zip(grads, ctx.floating, strict=True)
        ]
        return None, None, None, None, *found[ctx.own]
