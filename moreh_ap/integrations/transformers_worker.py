"""Hugging Face transformers on both sides of a call: caches that nest, models that know what they can record.

With the first, `generate` leaves a key-value cache on the workers, each its rows, and passes it back by name. Installed
in controller and workers; it must not import transformers before somebody else does.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moreh_ap.integrations.import_hook import when_imported

_CACHES: set[type] = set()


def install() -> None:
    """Register the cache classes with PyTorch's pytrees, now or when transformers is imported."""
    when_imported("transformers.cache_utils", _register)


def _register(module: ModuleType) -> None:
    for cls in [value for value in vars(module).values() if isinstance(value, type)]:
        layer = issubclass(cls, module.CacheLayerMixin)
        if (layer or issubclass(cls, module.Cache)) and cls not in pytree.SUPPORTED_NODES:
            _CACHES.add(cls)
            pytree.register_pytree_node(cls, _flatten, _unflatten(cls))


def complete_unpickled(module: nn.Module) -> None:
    """Do for a model that was unpickled what its constructor does beside setting attributes."""
    for part in module.modules():
        if any(cls.__module__ == "transformers.modeling_utils" for cls in type(part).__mro__):
            from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

            # Without it output_hidden_states=True gives None. Keyed by the class's name in every version since 5.17.
            dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(part)), part._can_record_outputs)


def cache_leaves(treespec: pytree.TreeSpec) -> frozenset[int]:
    """Which leaves of a nesting are keys and values in a cache: (batch, heads, positions, width) each."""
    if not _CACHES:  # transformers is not imported; asking sys.modules would find it half imported by another thread
        return frozenset()
    cache_class = sys.modules["transformers.cache_utils"].Cache
    leaves = [torch.empty(0) for _ in range(treespec.num_leaves)]  # tensors: others are no children of a cache
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    parts = pytree.tree_leaves(
        pytree.tree_unflatten(leaves, treespec), is_leaf=lambda node: isinstance(node, cache_class)
    )
    inside = (leaf for part in parts if isinstance(part, cache_class) for leaf in pytree.tree_leaves(part))
    return frozenset(numbers[id(leaf)] for leaf in inside)


def _flatten(obj: Any) -> Any:
    """Children are the tensors of an object, its list of layers, and caches in it; other attributes are context."""
    children = {name: value for name, value in vars(obj).items() if _is_child(name, value)}
    rest = {name: value for name, value in vars(obj).items() if name not in children}
    return list(children.values()), (tuple(children), tuple(rest.items()))


def _is_child(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) or name == "layers" or type(value) in _CACHES


def _unflatten(cls: Any) -> Any:
    def make(values: Any, context: Any) -> Any:
        names, rest = context
        obj = cls.__new__(cls)
        vars(obj).update(rest)
        vars(obj).update(zip(names, values))
        return obj

    return make
