"""Sequence parallelism: between the split layers of a block every rank has some tokens of the hidden states.

Decides what inside a block runs on some tokens and what needs all of them. Must not know which layers are split how.

[Note: inside a block]
A block is entered with this rank's tokens. Split attention and feed-forwards gather them at their own entry and scatter
their sums (`region.py`). Norms, dropouts and residual sums run on the tokens that are here, so the gradients of
norms are summed over the ranks. A child of the block with anything else in it (experts, a module of PyTorch's own) gets
all tokens and computes what every rank computes, from common random numbers; its output is cut again. A block returns a
`SplitTensor`, which the next block takes apart without a word; whoever else reads it gets the whole.

A sequence with fewer tokens than would give every rank one (a step of generation) is not split in that call.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from moreh_ap.errors import PlanError
from moreh_ap.parallelizer.rng.policy import OwnStream
from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.parallelizer.tensor.layer_splits import ParameterSlicer
from moreh_ap.parallelizer.tensor.split_tensor import SplitTensor, gather_split_tensors
from moreh_ap.parallelizer.tensor.styles import make_per_head, set_forward
from moreh_ap.protocol.blocks import block_lists
from moreh_ap.protocol.dropout import draws_random_numbers

_WIDTH = 8
"""Features that a block without norms is tried with."""
_FIX = 'plan="tensor={}"  # without sequence_parallel'


def split_sequences(module: nn.Module, slicer: ParameterSlicer, natural: set[int], trusted: bool) -> None:
    """Makes the blocks of a module, whose layers are split already, pass on split hidden states.

    Args:
        module: The whole model.
        parts: What split it.
        natural: Identities of the layers that may see some tokens.
        trusted: Whether blocks that cannot be tried alone are believed to treat every token by itself between layers.

    Raises:
        PlanError: It cannot be told what the blocks do between their layers.
    """
    fix = _FIX.format(slicer.crossing.size)
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise PlanError("sequence_parallel: the blocks of an encoder-decoder read two sequences", "decoders", fix)
    lists = [blocks for blocks in block_lists(module).values() if any(_has_split_layers(b, natural) for b in blocks)]
    if not lists:
        raise PlanError("sequence_parallel: no repeated block with split layers was found in this model", "", fix)
    for blocks in lists:
        for block in blocks:
            if any(param is not None for param in block._parameters.values()):
                raise PlanError(f"sequence_parallel: {type(block).__name__} has parameters of its own", "", fix)
        treats_tokens_alone = _treats_tokens_alone(blocks[0])
        if treats_tokens_alone is False or (treats_tokens_alone is None and not trusted):
            raise PlanError(
                f"sequence_parallel: it cannot be told that {type(blocks[0]).__name__} treats every token by itself "
                "between its layers",
                "blocks that can be called with hidden states alone, or those of transformers",
                fix,
            )
        for block in blocks:
            _split_block(block, slicer, natural, gathers=block is blocks[-1])


def _has_split_layers(block: nn.Module, natural: set[int]) -> bool:
    return any(id(sub) in natural for sub in block.modules())


def _split_block(block: nn.Module, slicer: ParameterSlicer, natural: set[int], gathers: bool) -> None:
    for child in block.children():
        for sub in _what_sees_tokens(child, natural):
            if id(sub) in natural:
                continue
            if sub is not child or _is_norm(sub):
                make_per_head(sub, slicer.crossing)
            else:
                _make_whole(sub, slicer)
    _make_block(block, slicer, gathers)


def _what_sees_tokens(child: nn.Module, natural: set[int]) -> list[nn.Module]:
    """Returns the parts of a block's child that have parameters and may run on some tokens, or the child itself."""
    leaves = [sub for sub in child.modules() if any(p is not None for p in sub._parameters.values())]
    if all(id(sub) in natural or _is_norm(sub) for sub in leaves):
        return leaves
    return [child]


def _is_norm(module: nn.Module) -> bool:
    params = [p for p in module._parameters.values() if p is not None]
    return bool(params) and "norm" in type(module).__name__.lower() and all(p.ndim == 1 for p in params)


def _make_whole(child: nn.Module, slicer: ParameterSlicer) -> None:
    """A child of a block that gets all tokens, and whose output is cut into tokens again."""
    state, crossing = slicer.sequence, slicer.crossing
    inner = child.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        length = state.length
        if length is None:
            return inner(*args, **kwargs)
        start, stop = crossing.shard_range(length)
        here = stop - start

        def gathered(value: Tensor) -> Tensor:
            has_tokens = value.ndim == 3 and value.is_floating_point() and value.shape[1] == here
            return crossing.gather(value, 1, length) if has_tokens else value

        def cut(value: Tensor) -> Tensor:
            return crossing.take(value, 1) if value.ndim == 3 and value.shape[1] == length else value

        args, kwargs = tree_map_only(Tensor, gathered, (args, kwargs))
        stream, state.stream, state.length = state.stream, None, None
        if stream is not None:
            stream.swap()
        try:
            result = inner(*args, **kwargs)
        finally:
            if stream is not None:
                stream.swap()
            state.stream, state.length = stream, length
        if isinstance(result, tuple):
            return (tree_map_only(Tensor, cut, result[0]), *result[1:])
        return tree_map_only(Tensor, cut, result)

    set_forward(child, forward)


def _make_block(block: nn.Module, slicer: ParameterSlicer, gathers: bool) -> None:
    state, crossing = slicer.sequence, slicer.crossing
    draws = draws_random_numbers(block)
    inner = block.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden, replace = _first_tensor(args, kwargs)
        length = hidden.shape[1] if hidden.ndim == 3 else 0
        if not splits(length, crossing):
            args, kwargs = gather_split_tensors((args, kwargs))
            return inner(*args, **kwargs)
        is_split = isinstance(hidden, SplitTensor) and hidden.split_dim == 1
        own = hidden.to_local() if is_split else crossing.take(gather_split_tensors(hidden), 1)  # type: ignore[attr-defined]
        args, kwargs = replace(own)
        args, kwargs = gather_split_tensors((args, kwargs))
        stream = OwnStream(crossing.rank, own.device) if draws() else None
        state.length, state.stream = length, stream
        try:
            result = inner(*args, **kwargs)
        finally:
            state.length = state.stream = None
            if stream is not None:
                stream.swap()
        first = result[0] if isinstance(result, tuple) else result
        if not isinstance(first, Tensor) or first.shape != own.shape:
            return result
        joined: Tensor = SplitTensor.from_local(first, length, 1, crossing)
        joined = gather_split_tensors(joined) if gathers else joined
        return (joined, *result[1:]) if isinstance(result, tuple) else joined

    set_forward(block, forward)


def splits(length: int, crossing: Crossing) -> bool:
    """Says whether a sequence of so many tokens is split: not if a rank would have none."""
    return (crossing.size - 1) * -(-length // crossing.size) < length


def _first_tensor(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Returns the first tensor among the arguments, and what puts another one in its place."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return value, partial(_with_argument, args, kwargs, index)
    for key, value in kwargs.items():
        if isinstance(value, Tensor):
            return value, partial(_with_argument, args, kwargs, key)
    return torch.empty(0), lambda own: (args, kwargs)


def _with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str, value: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(place, str):
        return args, {**kwargs, place: value}
    return (*args[:place], value, *args[place + 1 :]), kwargs


def _treats_tokens_alone(block: nn.Module) -> bool | None:
    """Tries whether a block, its children but the norms passing on what they get, treats every token by itself.

    Returns:
        None if the block cannot be called with hidden states alone.
    """
    parameters = list(inspect.signature(type(block).forward).parameters.values())[2:]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = {p.name: None for p in parameters if p.default is p.empty and p.kind in kinds}
    width = next((p.shape[0] for sub in block.modules() if _is_norm(sub) for p in sub.parameters()), _WIDTH)
    for as_tuple in (False, True):
        trial = copy.deepcopy(block).to_empty(device="cpu").float().eval()
        trial.__dict__.pop("forward", None)
        for child in trial.children():
            if not _is_norm(child):
                returns_tuple = as_tuple or isinstance(child, nn.MultiheadAttention)
                set_forward(child, _pass_on_as_tuple if returns_tuple else _pass_on)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in trial.parameters():
                param.copy_(torch.rand(param.shape, generator=generator) + 0.5)
            hidden = torch.randn(3, 4, width, generator=generator)
            try:
                together = trial(hidden, **needed)
                alone = [trial(hidden[:, i : i + 1], **needed) for i in range(4)]
            except Exception:  # any error of a forward that takes other hidden states: the next form is tried
                continue
        if isinstance(together, tuple):
            together, alone = together[0], [result[0] for result in alone]
        if not isinstance(together, Tensor):
            continue
        joined = torch.cat(alone, dim=1)
        return joined.shape == together.shape and torch.allclose(together, joined, rtol=1e-4, atol=1e-5)
    return None


def _pass_on(module: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden


def _pass_on_as_tuple(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, None]:
    return (args[0] if args else next(iter(kwargs.values()))), None
