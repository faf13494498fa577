"""Chooses, module by module, how a model is split over the ranks of the tensor axis.

Decides what is split by heads, by inner features, by the vocabulary, alone, or not at all. Must not know how any of it
is carried out, batches, or the controller.

[Note: how much is known]
1. What a model declares (`_tp_plan`, `base_model_tp_plan`) or shows in names and shapes is a guess
   (`structure.py`).
2. A guess is tried on one device with random weights where the module can be called alone (`split_trial.py`).
3. Where it cannot, a library's model is believed, a user's own is not.
4. What remains is split layer by layer, each output gathered at once: right for every linear layer, whatever is around.
All ranks come to the same conclusions. `decisions` has them as text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from moreh_ap.errors import PlanError
from moreh_ap.parallelizer.state.tensor_layout import Range
from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.parallelizer.tensor.declared_styles import styles_of, used_directly, uses_of_parameters
from moreh_ap.parallelizer.tensor.layer_splits import (
    ParameterSlicer,
    key_value_heads_of,
    split_attention,
    split_experts,
    split_feed_forward,
    split_gathered,
    split_vocabulary,
)
from moreh_ap.parallelizer.tensor.split_trial import survives
from moreh_ap.parallelizer.tensor.structure import (
    KNOWN_PAIRS,
    Attention,
    FeedForward,
    find_attention,
    find_feed_forward,
    in_features,
    is_experts,
    is_linear,
    out_features,
)
from moreh_ap.parallelizer.tensor.vocabulary_ends import find_vocabulary
from moreh_ap.protocol.blocks import block_lists
from moreh_ap.protocol.script_code.replaced_forwards import has_another_forward

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SMALLEST_GATHERED = 4
"""A layer is split alone if it has at least one output for so many inputs: a router has not."""


@dataclass
class Splitter:
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
        self.slicer = ParameterSlicer(self.module, self.crossing)
        self.trusted = hasattr(self.module, "config") and hasattr(self.module, "base_model_prefix")
        self._styles = styles_of(self.module)
        self._uses = uses_of_parameters(self.module)
        self._read_directly = used_directly(self.module)
        blocks = [block for members in block_lists(self.module).values() for block in members]
        self._blocks = blocks
        self._in_blocks = {id(sub) for block in blocks for sub in block.modules()}
        self._done: set[int] = set()
        self._tried: dict[Any, bool | None] = {}
        self._attention: Attention | None = None
        self._has_another_forward = has_another_forward(self.module)

    def run(self) -> None:
        """Splits the body, then the vocabulary; that stays whole where the script's own forward may read its weight."""
        vocabulary = find_vocabulary(self.module, self._blocks)
        if self._has_another_forward:
            self._note(self.module, "vocabulary whole on every rank: a forward was replaced")
            vocabulary = ([], [])
        self._done.update(id(layer) for found in vocabulary for layer in found)
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
            elif next(module.children(), None) is not None and next(iter(module.parameters()), None) is not None:
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
            outcome = self._outcome(module, found, partial(_split_attention_of, found), layers[0])
            believed = outcome is None and self.trusted and found is first
            if outcome or believed:
                split_attention(module, found, self.slicer)
                holder = module.get_submodule(found.holder)
                by_heads = [*found.per_head, found.bias] if found.bias else found.per_head
                self._settle([*layers, *(holder.get_submodule(name) for name in by_heads)])
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
        if not self._free(layers) or self.crossing.shard_range(inner)[0] >= inner or inner < self.crossing.size:
            return
        outcome: bool | None = True
        how = "in sequence"
        if not isinstance(module, nn.Sequential):
            outcome = self._outcome(module, found, partial(_split_feed_forward_of, found), layers[0])
            how = "tried on one device" if outcome else "believed: cannot be tried alone"
        if outcome or (outcome is None and self.trusted and _has_known_names(found, own)):
            split_feed_forward(module, found, self.slicer)
            self._settle(layers)
            self._note(module, f"{inner} inner features split; {how}")

    def _try_experts(self, module: nn.Module) -> bool:
        if not is_experts(module) or not self.trusted:
            return False
        split_experts(module, self.slicer)
        self._note(module, "inner features of every expert split")
        return True

    def _split_alone(self, layer: nn.Module, path: str) -> None:
        wide = out_features(layer) * _SMALLEST_GATHERED >= in_features(layer)
        fits = self.crossing.shard_range(out_features(layer))[0] < out_features(layer) and wide
        if id(layer) in self._done or id(layer) not in self._in_blocks or not self._free([layer]) or not fits:
            return
        if (self.crossing.size - 1) * -(-out_features(layer) // self.crossing.size) >= out_features(layer):
            return
        split_gathered(layer, self.slicer)
        self._done.add(id(layer))
        self._note(layer, f"{_starred(path)}: output features split and gathered")

    def _split_vocabulary(self, embeddings: list[nn.Embedding], heads: list[nn.Linear]) -> None:
        for layer_with_weight in {id(layer.weight): layer for layer in (*embeddings, *heads)}.values():
            weight: Any = layer_with_weight.weight
            users = self.slicer.users(weight)
            own_embeddings = [e for e in embeddings if any(e is user for user in users)]
            own_heads = [h for h in heads if any(h is user for user in users)]
            size, degree = weight.shape[0], self.crossing.size
            if len(own_embeddings) + len(own_heads) < len({id(user) for user in users}):
                self._note(layer_with_weight, "whole on every rank: something else uses its weight too")
            elif (degree - 1) * -(-size // degree) >= size:
                self._note(layer_with_weight, f"whole on every rank: {size} rows are too few for {degree} ranks")
            else:
                split_vocabulary(own_embeddings, own_heads, self.slicer)
                tied = "tied embedding and head" if own_embeddings and own_heads else type(layer_with_weight).__name__
                self.decisions[f"{tied}: {size} rows of the vocabulary split"] = 1

    def _outcome(
        self,
        module: nn.Module,
        found: Attention | FeedForward,
        split: Callable[[nn.Module, Crossing], None],
        first: nn.Module,
    ) -> bool | None:
        shapes = tuple(tuple(p.shape) for p in module.parameters())
        key = (type(module), shapes, found)
        if key not in self._tried:
            self._tried[key] = survives(module, split, self.crossing.size, in_features(first))
        return self._tried[key]

    def _free(self, layers: list[nn.Module]) -> bool:
        """Says whether no other split has one of these layers."""
        params = [p for layer in layers for p in layer.parameters()]
        known = self._done | self._read_directly
        return all(id(layer) not in known for layer in layers) and all(self._uses[id(p)] <= 1 for p in params)

    def _settle(self, layers: list[nn.Module]) -> None:
        self._done.update(id(layer) for layer in layers)
        self.natural.update(id(layer) for layer in layers)

    def _note(self, module: nn.Module, decision: str) -> None:
        line = f"{type(module).__name__}: {decision}"
        self.decisions[line] = self.decisions.get(line, 0) + 1


def _split_attention_of(found: Attention, copy: nn.Module, crossing: Crossing) -> None:
    split_attention(copy, found, ParameterSlicer(copy, crossing))


def _split_feed_forward_of(found: FeedForward, copy: nn.Module, crossing: Crossing) -> None:
    split_feed_forward(copy, found, ParameterSlicer(copy, crossing))


def _starred(path: str) -> str:
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def _has_known_names(found: FeedForward, declared: dict[str, str]) -> bool:
    if declared.get(found.row, "").startswith("rowwise"):
        return True
    return set(found.columns) <= KNOWN_PAIRS.get(found.row, set())


def _check_heads(found: Attention, degree: int, path: str) -> None:
    heads, key_value = found.heads, found.key_value_heads
    allowed = [d for d in range(1, heads + 1) if heads % d == 0 and (key_value % d == 0 or d % key_value == 0)]
    if degree not in allowed:
        raise PlanError(
            f"tensor={degree} cannot split {path}: it has {heads} heads, {key_value} of them for key and value",
            f"tensor={' or '.join(map(str, allowed))}",
            f'plan="tensor={max(d for d in allowed if d <= degree)}"',
        )
