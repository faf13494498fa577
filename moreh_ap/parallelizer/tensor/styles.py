"""The forwards of layers that hold a shard of their weights.

Decides how each kind of layer computes with its shard. Must not know which layers of a model are of which kind.

Every forward replaced here is set on the instance and looks parameters up when it runs: FSDP2 exchanges the objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moreh_ap.parallelizer.state.tensor_layout import Range
from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.parallelizer.tensor.region import Region
from moreh_ap.parallelizer.tensor.split_tensor import SplitTensor, gather_split_tensors
from moreh_ap.parallelizer.tensor.vocabulary import embed, localize_padding, vocabulary_logits


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replaces the forward of one module; `forward(module, *args, **kwargs)`."""
    object.__setattr__(module, "forward", MethodType(forward, module))


def own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward that the module's class defines."""
    return type(module).forward(module, *args, **kwargs)


@contextmanager
def substituted(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Inside the block the module sees `change(name, parameter)` in place of each of its own parameters."""
    names = [name for name, param in module._parameters.items() if param is not None]
    try:
        for name in names:
            module.__dict__[name] = change(name, module._parameters[name])  # type: ignore[arg-type]
        yield
    finally:
        for name in names:
            module.__dict__.pop(name, None)


def make_column(layer: nn.Module, region: Region) -> None:
    """A layer with some of its output features, whose whole input enters the region."""

    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        return own_forward(self, region.enter(gather_split_tensors(hidden)))

    set_forward(layer, forward)


def make_shared_column(layer: nn.Module, region: Region, length: int, dims: dict[str, int], own: Range) -> None:
    """A column layer whose shard other ranks have too: their gradients are summed.

    Args:
        layer: The layer.
        region: Its region.
        length: Number of output features of the whole layer.
        dims: For each parameter the dim with the output features.
        own: The output features that are here.
    """

    def shard(name: str, param: Tensor) -> Tensor:
        return _SharedShard.apply(param, dims[name], length, own, region.crossing)

    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        with substituted(self, shard):
            return own_forward(self, region.enter(gather_split_tensors(hidden)))

    set_forward(layer, forward)


class _SharedShard(torch.autograd.Function):
    """Returns a shard of a parameter that several ranks hold. Backward: sums the gradients of all that have it.

    Every rank lays its gradient into a zero tensor of the whole, which is summed over all ranks: no further process
    groups are needed, and the key-value weights that this is for are small.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, length: int, own: Range, crossing: Crossing) -> Tensor:
        ctx.dim, ctx.length, ctx.own, ctx.crossing = dim, length, own, crossing
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        start, stop = ctx.own
        shape = (*grad.shape[: ctx.dim], ctx.length, *grad.shape[ctx.dim + 1 :])
        summed = grad.new_zeros(shape)
        summed.narrow(ctx.dim, start, stop - start).copy_(grad)
        dist.all_reduce(summed, group=ctx.crossing.group)
        return summed.narrow(ctx.dim, start, stop - start).contiguous(), None, None, None, None


def make_row(layer: nn.Module, region: Region) -> None:
    """A layer with some of its input features: the ranks' outputs are summed, then the bias is added once."""

    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        weight: Any = self.weight
        bias: Any = self.bias
        partial = F.linear(hidden, weight) if isinstance(self, nn.Linear) else hidden @ weight
        output = region.leave(partial)
        if bias is None:
            return output
        return output + (bias if region.sequence.length is None else region.crossing.enter(bias))

    set_forward(layer, forward)


def make_gathered(layer: nn.Module, crossing: Crossing, out_features: int) -> None:
    """A layer with some of its output features, between code that has whole inputs and wants whole outputs."""

    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        return crossing.gather(own_forward(self, crossing.enter(gather_split_tensors(hidden))), -1, out_features)

    set_forward(layer, forward)


def make_vocabulary_embedding(embedding: nn.Embedding, rows: Range, crossing: Crossing) -> None:
    """An embedding with some rows of the vocabulary."""
    localize_padding(embedding, rows)

    def forward(self: nn.Embedding, input: Tensor) -> Tensor:
        return embed(self, input, rows, crossing)

    set_forward(embedding, forward)


def make_vocabulary_head(head: nn.Linear, vocabulary: int, crossing: Crossing) -> None:
    """A head with some rows of the vocabulary; its output is split."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        return vocabulary_logits(input, self.weight, self.bias, vocabulary, crossing)

    set_forward(head, forward)


def make_per_head(norm: nn.Module, crossing: Crossing) -> None:
    """A module whose parameters all heads share: here they see some heads, so gradients are summed over the ranks."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with substituted(self, lambda name, p: crossing.enter(p)):
            return own_forward(self, *args, **kwargs)

    set_forward(norm, forward)


def make_attention(attention: nn.Module, region: Region, local_heads: int, heads: int, narrowed: int | None) -> None:
    """The module around q, k and v.

    What it returns by heads besides its output (attention weights) is split along the heads. Of a position bias that an
    earlier block returned, the heads here are taken, even where FSDP2 has put it together on its way between blocks.

    Args:
        attention: The module whose children q, k and v are; its numbers of heads are the local ones already.
        region: The region of these layers.
        local_heads: Query heads here.
        heads: Query heads of all ranks.
        narrowed: The width that its input must seem to have, where the forward derives the width of heads from it; q, k
            and v get the whole input all the same.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _by_heads_here(args, kwargs, heads, region.crossing.shard_range(heads))
        try:
            if region.sequence.length is not None or narrowed is not None:
                args, kwargs = _first_tensor_replaced(args, kwargs, lambda hidden: _prepare(hidden, region, narrowed))
            result = own_forward(self, *args, **kwargs)
        finally:
            region.close()
        if isinstance(result, tuple):
            return (result[0], *(_by_heads(item, local_heads, heads, region.crossing) for item in result[1:]))
        return result

    set_forward(attention, forward)


def _prepare(hidden: Tensor, region: Region, narrowed: int | None) -> Tensor:
    entered = region.enter(hidden)
    seen = entered if narrowed is None else entered[..., :narrowed]
    region.counts_as(seen, entered)
    return seen


def _by_heads_here(
    args: tuple[Any, ...], kwargs: dict[str, Any], heads: int, own: Range
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def local(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim != 4:
            return value
        if isinstance(value, SplitTensor):
            return value.to_local()
        return value.narrow(1, own[0], own[1] - own[0]) if value.shape[1] == heads else value

    return tuple(local(value) for value in args), {key: local(value) for key, value in kwargs.items()}


def _by_heads(item: Any, local_heads: int, heads: int, crossing: Crossing) -> Any:
    if isinstance(item, Tensor) and item.ndim == 4 and item.shape[1] == local_heads:
        return SplitTensor.from_local(item, heads, 1, crossing)
    return item


def _first_tensor_replaced(
    args: Sequence[Any], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    for key, value in kwargs.items():
        if isinstance(value, Tensor):
            return tuple(args), {**kwargs, key: change(value)}
    return tuple(args), kwargs


def make_experts(experts: nn.Module, crossing: Crossing) -> None:
    """Experts that each have some of their inner features: `forward(hidden, expert of each, weight of each)`."""

    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        entered = crossing.enter(hidden_states)
        return crossing.leave(own_forward(self, entered, top_k_index, crossing.enter(top_k_weights)))

    set_forward(experts, forward)


def make_closing(container: nn.Module, region: Region) -> None:
    """Leaves a region in order also where the container's forward raises between its two ends."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return own_forward(self, *args, **kwargs)
        finally:
            region.close()

    set_forward(container, forward)
