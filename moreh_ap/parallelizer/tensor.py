"""Tensor parallelism: every layer of a model split over the ranks of one mesh axis, with one-device numbers.

Decides, module by module, how it is split. Must not know batches, other mesh axes, checkpoints or the controller.

[Note: ordinary parameters]
A rank's part of a parameter is an ordinary, smaller parameter, and a `TensorLayout` says what it is of the whole. It is
not a DTensor: fused projections need pieces from several places, key-value heads may be on several ranks, FSDP2 shards
the part over the data axes as if it were the whole, and optimizers run without dispatch. Activations cross the axis
through DTensor (`tensor_crossing.py`).

[Note: how much is known]
1. What a model declares (`_tp_plan`, `base_model_tp_plan`) or shows in names and shapes is a guess (`tensor_structure.py`).
2. A guess is tried on one device with random weights where the module can be called alone (`tensor_check.py`).
3. Where it cannot, a library's model is believed, a user's own is not.
4. What remains is split layer by layer, each output gathered at once: right for every linear layer, whatever is around.
All ranks come to the same conclusions. `decisions` has them as text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moreh_ap.errors import PlanError
from moreh_ap.parallelizer.blocks import block_lists
from moreh_ap.parallelizer.layout import Range, TensorLayout
from moreh_ap.parallelizer.tensor_check import survives
from moreh_ap.parallelizer.tensor_crossing import Crossing
from moreh_ap.parallelizer.tensor_parts import (
    Parts,
    key_value_heads_of,
    split_attention,
    split_experts,
    split_feed_forward,
    split_gathered,
    split_vocabulary,
)
from moreh_ap.parallelizer.tensor_structure import (
    Attention,
    FeedForward,
    find_attention,
    find_feed_forward,
    find_vocabulary,
    in_features,
    is_experts,
    is_linear,
    out_features,
    styles_of,
    uses_of_parameters,
)

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SMALLEST_GATHERED = 4
"""A layer is split with its output gathered if it has at least a quarter as many outputs as inputs: a router has not."""


@dataclass(frozen=True)
class TensorParallel:
    """What tensor parallelism made of a module on this rank.

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


def apply_tensor_parallel(
    module: nn.Module, group: DeviceMesh | dist.ProcessGroup, *, sequence_parallel: bool = False
) -> TensorParallel:
    """Splits `module` in place. Afterwards it is called as before, with the same arguments on every rank.

    Logits, and whatever else is still split when the module returns, are `SplitTensor`s: `full_tensor()` gathers one.

    Args:
        module: The whole model, on meta or with values.
        group: The tensor axis: a mesh of one dim, or a process group.
        sequence_parallel: Whether hidden states between the split layers of a block are split along the sequence.

    Raises:
        PlanError: The model cannot be split over so many ranks, or its sequences cannot be split.
    """
    mesh = group if isinstance(group, DeviceMesh) else _mesh_of(group)
    splitter = _Splitter(module, Crossing(mesh))
    splitter.run()
    if sequence_parallel:
        from moreh_ap.parallelizer.tensor_sequence import split_sequences

        split_sequences(module, splitter.parts, splitter.natural, splitter.trusted)
        splitter.decisions["hidden states: split along the sequence between the split layers of a block"] = 1
    lines = [line if count == 1 else f"{line} ({count} times)" for line, count in splitter.decisions.items()]
    return TensorParallel(splitter.parts.layouts(), tuple(lines), *splitter.cache())


def _mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    on_device = dist.get_backend(group) == "nccl"
    return DeviceMesh.from_group(group, "cuda" if on_device else "cpu")


@dataclass
class _Splitter:
    """Walks through a module and splits what it finds.

    Attributes:
        natural: Identities of the layers that are split with both ends known: they may see parts of a sequence.
        decisions: What was decided, and how often.
        trusted: Whether the model is a library's, whose names mean what they say.
    """

    module: nn.Module
    crossing: Crossing
    natural: set[int] = field(default_factory=set)
    decisions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parts = Parts(self.module, self.crossing)
        self.trusted = hasattr(self.module, "config") and hasattr(self.module, "base_model_prefix")
        self._styles = styles_of(self.module)
        self._uses = uses_of_parameters(self.module)
        blocks = [block for members in block_lists(self.module).values() for block in members]
        self._blocks = blocks
        self._in_blocks = {id(sub) for block in blocks for sub in block.modules()}
        self._done: set[int] = set()
        self._tried: dict[Any, bool | None] = {}
        self._attention: Attention | None = None

    def run(self) -> None:
        """Splits the body, then the vocabulary."""
        vocabulary = find_vocabulary(self.module, self._blocks)
        self._done.update(id(part) for found in vocabulary for part in found)
        self._walk(self.module, "")
        self._split_vocabulary(*vocabulary)

    def cache(self) -> tuple[int | None, tuple[Range, ...] | None, bool]:
        """Returns the last three attributes of `TensorParallel`."""
        if self._attention is None:
            return None, None, True
        own, sharers = key_value_heads_of(self._attention, self.crossing.size, self.crossing.rank)
        return self._attention.key_value_heads, (own,), self.crossing.rank % sharers == 0

    def _walk(self, module: nn.Module, path: str) -> None:
        if id(module) in self._done:
            return
        if type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS):
            if is_linear(module):
                self._split_alone(module, path)
            elif next(module.children(), None) is not None and next(module.parameters(), None) is not None:
                self._note(module, "whole on every rank: PyTorch's own module uses its layers' weights directly")
            return
        if self._try_attention(module, path) or self._try_experts(module):
            self._done.add(id(module))
        else:
            self._try_feed_forward(module, path)
        if is_linear(module):
            self._split_alone(module, path)
            return
        for name, child in module.named_children():
            self._walk(child, f"{path}.{name}" if path else name)

    def _try_attention(self, module: nn.Module, path: str) -> bool:
        candidates = find_attention(module)
        if not candidates:
            return False
        first = candidates[0]
        names = [*(f"{first.holder}.{n}" if first.holder else n for n in first.columns), first.row]
        layers = [module.get_submodule(name) for name in names]
        if not self._free(layers):
            return False
        _check_heads(first, self.crossing.size, path)
        if len(first.columns) == 1 and first.key_value_heads % self.crossing.size:
            self._note(module, "fused q, k and v with fewer key-value heads than ranks cannot be split by heads")
            return False
        for found in candidates:
            outcome = self._outcome(module, found, lambda copy, parts, f=found: split_attention(copy, f, parts), layers[0])
            believed = outcome is None and self.trusted and found is first
            if outcome or believed:
                split_attention(module, found, self.parts)
                per_head = [module.get_submodule(found.holder).get_submodule(p) for p in (*found.per_head, *_one(found.bias))]
                self._settle([*layers, *per_head])
                self._attention = self._attention or found
                how = "tried on one device" if outcome else "believed: cannot be tried alone"
                self._note(module, f"{found.heads} heads, {found.key_value_heads} for key and value, split; {how}")
                return True
        return False

    def _try_feed_forward(self, module: nn.Module, path: str) -> None:
        prefix = f"{_starred(path)}." if path else ""
        own = {key.removeprefix(prefix): style for key, style in self._styles.items() if key.startswith(prefix)}
        found = find_feed_forward(module, own)
        if found is None:
            return
        layers = [module.get_submodule(name) for name in (*found.columns, found.row)]
        inner = in_features(layers[-1])
        if not self._free(layers) or self.crossing.part_of(inner)[0] >= inner or inner < self.crossing.size:
            return
        outcome: bool | None = True
        how = "in sequence"
        if not isinstance(module, nn.Sequential):
            outcome = self._outcome(
                module, found, lambda copy, parts: split_feed_forward(copy, found, parts), layers[0]
            )
            how = "tried on one device" if outcome else "believed: cannot be tried alone"
        if outcome or (outcome is None and self.trusted and _has_known_names(found, own)):
            split_feed_forward(module, found, self.parts)
            self._settle(layers)
            self._note(module, f"{inner} inner features split; {how}")

    def _try_experts(self, module: nn.Module) -> bool:
        if not is_experts(module) or not self.trusted:
            return False
        split_experts(module, self.parts)
        self._note(module, "inner features of every expert split")
        return True

    def _split_alone(self, layer: nn.Module, path: str) -> None:
        wide = out_features(layer) * _SMALLEST_GATHERED >= in_features(layer)
        fits = self.crossing.part_of(out_features(layer))[0] < out_features(layer) and wide
        if id(layer) in self._done or id(layer) not in self._in_blocks or not self._free([layer]) or not fits:
            return
        if (self.crossing.size - 1) * -(-out_features(layer) // self.crossing.size) >= out_features(layer):
            return
        split_gathered(layer, self.parts)
        self._done.add(id(layer))
        self._note(layer, f"{_starred(path)}: output features split and gathered")

    def _split_vocabulary(self, embeddings: list[nn.Embedding], heads: list[nn.Linear]) -> None:
        for parts_of_one in {id(part.weight): part for part in (*embeddings, *heads)}.values():
            weight = parts_of_one.weight
            users = self.parts.users(weight)
            own_embeddings = [e for e in embeddings if any(e is user for user in users)]
            own_heads = [h for h in heads if any(h is user for user in users)]
            size, degree = weight.shape[0], self.crossing.size
            if len(own_embeddings) + len(own_heads) < len({id(user) for user in users}):
                self._note(parts_of_one, "whole on every rank: something else uses its weight too")
            elif (degree - 1) * -(-size // degree) >= size:
                self._note(parts_of_one, f"whole on every rank: {size} rows are too few for {degree} ranks")
            else:
                split_vocabulary(own_embeddings, own_heads, self.parts)
                tied = "tied embedding and head" if own_embeddings and own_heads else type(parts_of_one).__name__
                self.decisions[f"{tied}: {size} rows of the vocabulary split"] = 1

    def _outcome(
        self, module: nn.Module, found: Attention | FeedForward, split: Callable[[nn.Module, Parts], None], first: nn.Module
    ) -> bool | None:
        shapes = tuple(tuple(p.shape) for p in module.parameters())
        key = (type(module), shapes, found)
        if key not in self._tried:
            self._tried[key] = survives(
                module, lambda copy, crossing: split(copy, Parts(copy, crossing)), self.crossing.size, in_features(first)
            )
        return self._tried[key]

    def _free(self, layers: list[nn.Module]) -> bool:
        """Says whether nobody else has a part in these layers."""
        params = [p for layer in layers for p in layer.parameters()]
        return all(id(layer) not in self._done for layer in layers) and all(self._uses[id(p)] <= 1 for p in params)

    def _settle(self, layers: list[nn.Module]) -> None:
        self._done.update(id(layer) for layer in layers)
        self.natural.update(id(layer) for layer in layers)

    def _note(self, module: nn.Module, decision: str) -> None:
        line = f"{type(module).__name__}: {decision}"
        self.decisions[line] = self.decisions.get(line, 0) + 1


def _one(name: str) -> tuple[str, ...]:
    return (name,) if name else ()


def _starred(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _has_known_names(found: FeedForward, declared: dict[str, str]) -> bool:
    if declared.get(found.row, "").startswith("rowwise"):
        return True
    known = {
        "down_proj": {"up_proj", "gate_proj", "gate_up_proj"},
        "c_proj": {"c_fc"},
        "fc2": {"fc1"},
        "wo": {"wi", "wi_0", "wi_1"},
        "w2": {"w1", "w3"},
        "dense_4h_to_h": {"dense_h_to_4h"},
        "lin2": {"lin1"},
        "output.dense": {"intermediate.dense"},
    }
    return set(found.columns) <= known.get(found.row, set())


def _check_heads(found: Attention, degree: int, path: str) -> None:
    heads, key_value = found.heads, found.key_value_heads
    allowed = [d for d in range(1, heads + 1) if heads % d == 0 and (key_value % d == 0 or d % key_value == 0)]
    if degree not in allowed:
        raise PlanError(
            f"tensor={degree} cannot split {path}: it has {heads} heads, {key_value} of them for key and value",
            f"tensor={' or '.join(map(str, allowed))}",
            f'plan="tensor={max(d for d in allowed if d <= degree)}"',
        )
