"""Finds in a module what can be split: attention by heads, feed-forwards and experts by inner features.

Decides from names, shapes and numbers in attributes what a module may be. Must not know ranks, or how anything is
split; whether a guess is right is for `split_trial.py` and the split check to show.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

_QUERY = ("q_proj", "query", "q", "q_lin", "to_q", "wq", "w_q", "W_q", "query_proj", "q_linear", "queries")
_KEY = ("k_proj", "key", "k", "k_lin", "to_k", "wk", "w_k", "W_k", "key_proj", "k_linear", "keys")
_VALUE = ("v_proj", "value", "v", "v_lin", "to_v", "wv", "w_v", "W_v", "value_proj", "v_linear", "values")
_FUSED = (
    "c_attn", "qkv_proj", "qkv", "query_key_value", "Wqkv", "in_proj", "attn_qkv", "to_qkv", "W_pack", "qkv_linear",
)  # fmt: skip
HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads", "n_local_heads")
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "n_local_kv_heads")
GROUP_COUNTS = ("num_key_value_groups", "num_groups", "n_rep")
_HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_head", "d_k", "dim_head")
WIDTHS = (
    "split_size", "embed_dim", "all_head_size", "inner_dim", "n_embd", "hidden_size", "d_model", "dim", "embed_size",
    "hidden_dim", "n_state", "width", "hidden",
)  # fmt: skip
_BY_HEADS_FROM_OUTSIDE = {"alibi", "rel_pos", "relative_position", "rel_pos_bias", "layer_head_bias"}
"""Arguments that bring something for every head, which would have to be split with them."""


KNOWN_PAIRS = {
    "down_proj": {"up_proj", "gate_proj", "gate_up_proj"},
    "c_proj": {"c_fc"},
    "fc2": {"fc1"},
    "wo": {"wi", "wi_0", "wi_1"},
    "w2": {"w1", "w3"},
    "dense_4h_to_h": {"dense_h_to_4h"},
    "lin2": {"lin1"},
    "output.dense": {"intermediate.dense"},
}
"""Names in libraries of layers that take inner features, and of those that give them."""


def is_linear(module: Any) -> bool:
    """Says whether a module is a linear layer and nothing more: `nn.Linear`, `Conv1D`, or Falcon's own class."""
    return (
        type(module) is nn.Linear
        or type(module).__name__ == "FalconLinear"
        or (type(module).__name__ == "Conv1D" and hasattr(module, "nf") and module.weight.ndim == 2)
    )


def out_dim(layer: nn.Module) -> int:
    """Returns the dim of a linear layer's weight that has its output features."""
    return 0 if isinstance(layer, nn.Linear) else 1


def out_features(layer: nn.Module) -> int:
    """Returns the number of a linear layer's output features."""
    return layer.weight.shape[out_dim(layer)]  # type: ignore[index,union-attr,return-value]


def in_features(layer: nn.Module) -> int:
    """Returns the number of a linear layer's input features."""
    return layer.weight.shape[1 - out_dim(layer)]  # type: ignore[index,union-attr,return-value]


@dataclass(frozen=True)
class Attention:
    """Attention that can be split by heads.

    Attributes:
        holder: Path, from the container, of the module whose children q, k and v are.
        columns: Names of q, k and v in the holder, or of the one layer that gives all three.
        row: Path of the output layer from the container.
        heads: Number of query heads.
        key_value_heads: Number of key-value heads.
        width: Features of a head.
        interleaved: Whether the one layer gives q, k and v head by head, not one after the other.
        narrowed: Whether the forward takes the width of its input for that of its heads.
        per_head: Paths in the holder of modules whose parameters all heads share.
        bias: Name in the holder of a table with a column for every head, if there is one.
    """

    holder: str
    columns: tuple[str, ...]
    row: str
    heads: int
    key_value_heads: int
    width: int
    interleaved: bool = False
    narrowed: bool = False
    per_head: tuple[str, ...] = ()
    bias: str = ""


@dataclass(frozen=True)
class FeedForward:
    """Layers of which one gives inner features and another takes them.

    Attributes:
        columns: Paths, from the container, of the layers that give inner features.
        row: Path of the layer that takes them.
        packed: Whether the one layer of `columns` gives gate and value one after the other.
    """

    columns: tuple[str, ...]
    row: str
    packed: bool = False


def find_attention(module: nn.Module) -> list[Attention]:
    """Returns what a module may be as attention, the likeliest first; nothing where it is none that can be split."""
    holder, path = module, ""
    inner, outer = getattr(module, "self", None), getattr(module, "output", None)
    if isinstance(inner, nn.Module) and is_linear(getattr(outer, "dense", None)):
        holder, path = inner, "self"
    linears = {name: child for name, child in holder.named_children() if is_linear(child)}
    columns = _columns(linears)
    if not columns:
        return []
    rest = [name for name in linears if name not in columns]
    row = "output.dense" if path else (rest[0] if len(rest) == 1 else "")
    counts = _heads(holder, [out_features(linears[name]) for name in columns])
    if not row or counts is None or in_features(module.get_submodule(row)) != counts[0] * counts[2]:
        return []
    others = _others(holder, set(linears), counts[2], counts[0])
    arguments = inspect.signature(type(holder).forward).parameters
    if others is None or _takes_something_by_heads(holder, set(arguments), others[1]):
        return []
    first = columns == ("query_key_value",)
    orders = (first, not first) if len(columns) == 1 and counts[0] == counts[1] else (False,)
    return [
        Attention(path, columns, row, *counts, interleaved, narrowed, others[0], others[2])
        for narrowed in (False, True)
        for interleaved in orders
    ]


def _takes_something_by_heads(holder: nn.Module, arguments: set[str], has_own_bias: bool) -> bool:
    if getattr(getattr(holder, "config", None), "alibi", True) is False:
        arguments = arguments - {"alibi"}
    return bool(_BY_HEADS_FROM_OUTSIDE & arguments) or ("position_bias" in arguments and not has_own_bias)


def _columns(linears: dict[str, nn.Module]) -> tuple[str, ...]:
    fused = [name for name in _FUSED if name in linears]
    if len(fused) == 1:
        return (fused[0],)
    for names in zip(_QUERY, _KEY, _VALUE):
        if all(name in linears for name in names):
            return names
    return ()


def _heads(holder: nn.Module, sizes: list[int]) -> tuple[int, int, int] | None:
    """Returns query heads, key-value heads and the width of a head, if they explain the sizes of q, k and v."""
    sources = (holder, getattr(holder, "config", None))
    heads = _number(sources, HEAD_COUNTS)
    width = _number(sources, _HEAD_WIDTHS)
    if width is None and heads:
        width = sizes[0] // heads // (3 if len(sizes) == 1 else 1)
    if heads is None and width and len(sizes) == 3:
        heads = sizes[0] // width
    if not heads or not width:
        return None
    if len(sizes) == 3:
        key_value_heads = sizes[1] // width
        explained = sizes[0] == heads * width and sizes[1] == sizes[2] == key_value_heads * width
    else:
        key_value_heads = _number(sources, KEY_VALUE_COUNTS) or heads
        explained = sizes[0] == (heads + 2 * key_value_heads) * width
    return (heads, key_value_heads, width) if explained and heads % key_value_heads == 0 else None


def _number(sources: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _others(holder: nn.Module, linears: set[str], width: int, heads: int) -> tuple[tuple[str, ...], bool, str] | None:
    """Returns what else has parameters: modules that all heads share, whether the class knows a bias by heads, its
    name. None if there is something that heads do not share.
    """
    has_bias_class = hasattr(holder, "has_relative_attention_bias")
    if any(param is not None for param in holder._parameters.values()):
        return None
    per_head, bias = [], ""
    for name, child in holder.named_children():
        if name in linears:
            continue
        shapes = [tuple(p.shape) for p in child.parameters()]
        if not shapes:
            continue
        if name == "relative_attention_bias" and type(child) is nn.Embedding and shapes[0][1] == heads:
            bias = name
        elif all(shape == (width,) for shape in shapes) and next(child.children(), None) is None:
            per_head.append(name)
        else:
            return None
    return tuple(per_head), has_bias_class, bias


def find_feed_forward(module: nn.Module, styles: dict[str, str]) -> FeedForward | None:
    """Returns what a module may be as a feed-forward.

    Args:
        module: The module; of a Sequential the first fitting pair is found.
        styles: What the model itself says about the module's layers, by path from the module: "colwise", "rowwise", ...
    """
    inner, outer = getattr(module, "intermediate", None), getattr(module, "output", None)
    if is_linear(getattr(inner, "dense", None)) and is_linear(getattr(outer, "dense", None)):
        return _pair(module, ("intermediate.dense",), "output.dense")
    linears = [name for name, child in module.named_children() if is_linear(child)]
    if isinstance(module, nn.Sequential):
        return _pair_in_sequence(module)
    rows = [name for name in linears if styles.get(name, "").startswith("rowwise")]
    columns = tuple(name for name in linears if styles.get(name, "").startswith(("colwise", "packed")))
    if len(rows) == 1 and len(columns) + 1 == len(linears):
        return _pair(module, columns, rows[0])
    if not 2 <= len(linears) <= 3:
        return None
    candidates = [*linears[:0:-1], linears[0]]  # the last one is the likeliest
    named = [name for name in candidates if name in KNOWN_PAIRS]
    for row in [*named, *candidates]:
        found = _pair(module, tuple(name for name in linears if name != row), row)
        if found is not None:
            return found
    return None


def _pair(module: nn.Module, columns: tuple[str, ...], row: str) -> FeedForward | None:
    layers = [module.get_submodule(path) for path in columns]
    inner = in_features(module.get_submodule(row))
    sizes = {(in_features(layer), out_features(layer)) for layer in layers}
    if len(sizes) != 1:
        return None
    given = out_features(layers[0])
    if given == inner:
        return FeedForward(columns, row)
    return FeedForward(columns, row, packed=True) if given == 2 * inner and len(columns) == 1 else None


def _pair_in_sequence(module: nn.Sequential) -> FeedForward | None:
    """Returns two linear layers of which one computes on the other's features, with only elementwise modules between.

    None if there are no such two.
    """
    last: str | None = None
    for name, child in module.named_children():
        if is_linear(child):
            if last is not None and in_features(child) == out_features(module.get_submodule(last)):
                return FeedForward((last,), name)
            last = name
        elif not _is_elementwise(child):
            last = None
    return None


def _is_elementwise(module: nn.Module) -> bool:
    kinds = (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity, nn.LeakyReLU, nn.ELU, nn.Mish)
    return type(module) in (*kinds, nn.ReLU6, nn.Hardswish, nn.Softplus, nn.SELU)


def is_experts(module: nn.Module) -> bool:
    """Says whether a module has all experts in two parameters.

    Their shapes are (experts, 2 x inner, hidden) and (experts, hidden, inner).
    """
    up, down = module._parameters.get("gate_up_proj"), module._parameters.get("down_proj")
    if up is None or down is None or up.ndim != 3 or down.ndim != 3 or len(module._parameters) != 2:
        return False
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    fits = up.shape[1] == 2 * down.shape[2] and up.shape[2] == down.shape[1]
    return fits and names == ["hidden_states", "top_k_index", "top_k_weights"]
