"""Splits the parameters of what was found in a module, and gives its layers the forwards that go with it.

Decides which elements of which parameter a rank keeps. Must not know how attention or feed-forwards are found.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from moreh_ap.parallelizer.state.tensor_layout import Range, TensorLayout, shard_range, shifted
from moreh_ap.parallelizer.tensor import styles
from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.parallelizer.tensor.region import Region, SequenceState
from moreh_ap.parallelizer.tensor.structure import (
    GROUP_COUNTS,
    HEAD_COUNTS,
    KEY_VALUE_COUNTS,
    WIDTHS,
    Attention,
    FeedForward,
    in_features,
    out_dim,
    out_features,
)
from moreh_ap.protocol.dropout import draws_random_numbers


class ParameterSlicer:
    """Splits parameters of one module tree, tied ones together.

    Args:
        root: The tree.
        crossing: The ranks of the tensor axis.
        sequence: Whether hidden states are split along the sequence; shared by all regions.
    """

    def __init__(self, root: nn.Module, crossing: Crossing, sequence: SequenceState | None = None) -> None:
        self.crossing = crossing
        self.sequence = sequence or SequenceState()
        self._root = root
        self._users: dict[int, list[tuple[nn.Module, str]]] = {}
        self._layouts: dict[int, TensorLayout] = {}
        for sub in root.modules():
            for name, param in sub._parameters.items():
                if param is not None:
                    self._users.setdefault(id(param), []).append((sub, name))

    def users(self, param: nn.Parameter) -> list[nn.Module]:
        """Returns the modules that have a parameter."""
        return [sub for sub, _ in self._users[id(param)]]

    def layouts(self) -> dict[str, TensorLayout]:
        """Returns the layouts of all split parameters by full name, tied names included."""
        named = self._root.named_parameters(remove_duplicate=False)
        return {name: self._layouts[id(param)] for name, param in named if id(param) in self._layouts}

    def keep(self, module: nn.Module, name: str, dim: int, ranges: Iterable[Range], writes: bool = True) -> None:
        """Leaves of a parameter only some ranges along `dim`, everywhere in the tree where it is used."""
        param = module._parameters.get(name)
        if param is None or id(param) in self._layouts:
            return
        ranges = tuple(ranges)
        with torch.no_grad():
            kept = torch.cat([param.narrow(dim, start, stop - start) for start, stop in ranges], dim)
            shard = nn.Parameter(kept.clone() if kept.is_meta else kept.contiguous(), param.requires_grad)
        shard.__dict__.update(param.__dict__)
        users = self._users.pop(id(param))
        for user, own_name in users:
            user._parameters[own_name] = shard
        self._users[id(shard)] = users
        self._layouts[id(shard)] = TensorLayout(tuple(param.shape), dim, ranges, writes)

    def keep_outputs(self, layer: nn.Module, ranges: Iterable[Range], writes: bool = True) -> None:
        """Leaves of a linear layer only some of its output features."""
        ranges = tuple(ranges)
        self.keep(layer, "weight", out_dim(layer), ranges, writes)
        self.keep(layer, "bias", 0, ranges, writes)
        count = sum(stop - start for start, stop in ranges)
        layer.__dict__.update({name: count for name in ("out_features", "nf") if name in layer.__dict__})

    def keep_inputs(self, layer: nn.Module, own: Range) -> None:
        """Leaves of a linear layer only some of its input features."""
        self.keep(layer, "weight", 1 - out_dim(layer), [own])
        layer.__dict__.update({name: own[1] - own[0] for name in ("in_features", "nx") if name in layer.__dict__})

    def region(self, module: nn.Module) -> Region:
        """Returns a new region whose random numbers are those that `module` draws."""
        return Region(self.crossing, self.sequence, draws_random_numbers(module))


def split_attention(container: nn.Module, found: Attention, slicer: ParameterSlicer) -> None:
    """Leaves the rank its heads."""
    rank, degree, width = slicer.crossing.rank, slicer.crossing.size, found.width
    holder = container.get_submodule(found.holder)
    region = slicer.region(holder)
    queries = shard_range(found.heads, degree, rank)
    keys, sharers = key_value_heads_of(found, degree, rank)
    query_range, key_range = _times(queries, width), _times(keys, width)
    row = container.get_submodule(found.row)
    if len(found.columns) == 1:
        layer = holder.get_submodule(found.columns[0])
        after_query, after_key = found.heads * width, (found.heads + found.key_value_heads) * width
        apart = (query_range, *shifted([key_range], after_query), *shifted([key_range], after_key))
        slicer.keep_outputs(layer, [_times(queries, 3 * width)] if found.interleaved else apart)
        styles.make_column(layer, region)
    else:
        query, *key_and_value = (holder.get_submodule(name) for name in found.columns)
        slicer.keep_outputs(query, [query_range])
        styles.make_column(query, region)
        for layer in key_and_value:
            length, dims = out_features(layer), {"weight": out_dim(layer), "bias": 0}
            slicer.keep_outputs(layer, [key_range], writes=rank % sharers == 0)
            if sharers == 1:
                styles.make_column(layer, region)
            else:
                styles.make_shared_column(layer, region, length, dims, key_range)
    slicer.keep_inputs(row, query_range)
    styles.make_row(row, region)
    for path in found.per_head:
        styles.make_per_head(holder.get_submodule(path), slicer.crossing)
    if found.bias:
        slicer.keep(holder.get_submodule(found.bias), "weight", 1, [queries])
        holder.get_submodule(found.bias).embedding_dim = queries[1] - queries[0]  # type: ignore[assignment]
    _adjust_numbers(holder, found, queries[1] - queries[0], keys[1] - keys[0])
    narrowed = query_range[1] - query_range[0] if found.narrowed else None
    styles.make_attention(holder, region, queries[1] - queries[0], found.heads, narrowed)


def key_value_heads_of(found: Attention, degree: int, rank: int) -> tuple[Range, int]:
    """Returns the key-value heads of a rank, and how many ranks have the same ones."""
    if found.key_value_heads % degree == 0:
        return shard_range(found.key_value_heads, degree, rank), 1
    sharers = degree // found.key_value_heads
    return (rank // sharers, rank // sharers + 1), sharers


def _times(heads: Range, width: int) -> Range:
    return heads[0] * width, heads[1] * width


def _adjust_numbers(holder: nn.Module, found: Attention, heads: int, key_value_heads: int) -> None:
    """Numbers of heads, and widths that follow from them, become this rank's in the module and in its configuration."""
    counts = dict.fromkeys(HEAD_COUNTS, (found.heads, heads))
    counts |= dict.fromkeys(KEY_VALUE_COUNTS, (found.key_value_heads, key_value_heads))
    numbers = counts | dict.fromkeys(WIDTHS, (found.heads * found.width, heads * found.width))
    numbers |= dict.fromkeys(GROUP_COUNTS, (found.heads // found.key_value_heads, heads // key_value_heads))
    for name, (everywhere, here) in numbers.items():
        if holder.__dict__.get(name) == everywhere:
            holder.__dict__[name] = here
    config = getattr(holder, "config", None)
    local = {name: here for name, (everywhere, here) in counts.items() if getattr(config, name, None) == everywhere}
    if local:
        holder.config = LocalConfig(config, local)  # type: ignore[assignment]


class LocalConfig:
    """A configuration in which some numbers are this rank's; everything else is asked of the model's own."""

    def __init__(self, config: Any, local: dict[str, int]) -> None:
        self.__dict__.update(local)
        self.__dict__["_moreh_config"] = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_moreh_config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_moreh_config"], name)


def split_feed_forward(container: nn.Module, found: FeedForward, slicer: ParameterSlicer) -> None:
    """Leaves the rank some inner features."""
    row = container.get_submodule(found.row)
    inner = in_features(row)
    own = slicer.crossing.shard_range(inner)
    region = slicer.region(container)
    for path in found.columns:
        layer = container.get_submodule(path)
        slicer.keep_outputs(layer, [own, *shifted([own], inner)] if found.packed else [own])
        styles.make_column(layer, region)
    slicer.keep_inputs(row, own)
    styles.make_row(row, region)
    styles.make_closing(container, region)


def split_experts(experts: nn.Module, slicer: ParameterSlicer) -> None:
    """Leaves the rank some inner features of every expert."""
    inner = experts._parameters["down_proj"].shape[2]  # type: ignore[union-attr]
    own = slicer.crossing.shard_range(inner)
    slicer.keep(experts, "gate_up_proj", 1, [own, *shifted([own], inner)])
    slicer.keep(experts, "down_proj", 2, [own])
    for name in ("intermediate_dim", "intermediate_size", "ffn_dim"):
        if experts.__dict__.get(name) == inner:
            experts.__dict__[name] = own[1] - own[0]
    styles.make_experts(experts, slicer.crossing)


def split_gathered(layer: nn.Module, slicer: ParameterSlicer) -> None:
    """Leaves the rank some output features of one layer, whose output is gathered."""
    length = out_features(layer)
    slicer.keep_outputs(layer, [slicer.crossing.shard_range(length)])
    styles.make_gathered(layer, slicer.crossing, length)


def split_vocabulary(embeddings: Iterable[nn.Embedding], heads: Iterable[nn.Linear], slicer: ParameterSlicer) -> None:
    """Leaves the rank some rows of the vocabulary."""
    for embedding in embeddings:
        rows = slicer.crossing.shard_range(embedding.num_embeddings)
        slicer.keep(embedding, "weight", 0, [rows])
        styles.make_vocabulary_embedding(embedding, rows, slicer.crossing)
    for head in heads:
        vocabulary = head.out_features
        slicer.keep(head, "weight", 0, [slicer.crossing.shard_range(vocabulary)])
        slicer.keep(head, "bias", 0, [slicer.crossing.shard_range(vocabulary)])
        styles.make_vocabulary_head(head, vocabulary, slicer.crossing)
