"""Hugging Face transformers on both sides of a call: caches that nest, models that know what they can record.

With the first, `generate` leaves a key-value cache on the workers, each its rows, and passes it back by name. Installed
in controller and workers; it must not import transformers before other code does.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from moreh_ap.patching import Patches
from moreh_ap.protocol.pytree import add_node, register_by_attributes

_CACHES: set[type] = set()
_RECORDED: set[str] = set()
_MODEL = "transformers.modeling_utils.PreTrainedModel"


def install(patches: Patches) -> None:
    """Register the cache classes with PyTorch's pytrees, now or when transformers is imported.

    The classes are removed by what `moreh_ap.protocol.pytree.install` notes.
    """
    group = patches.group("Batches and caches of transformers are arguments and results of models.")
    group.when_imported("transformers.cache_utils", _register)
    group.when_imported("transformers.tokenization_utils_base", lambda module: _register_batch(module.BatchEncoding))
    group.when_imported("transformers.feature_extraction_utils", lambda module: _register_batch(module.BatchFeature))
    patches.on_undo(_CACHES.clear)


def note_recorded(patches: Patches) -> None:
    """Note what `complete_unpickled` writes from now on, and have it taken back by the undoing."""
    patches.group("The constructor of a model of transformers, which unpickling does not call, fills this table.").note(
        "transformers.utils.output_capturing._CAN_RECORD_REGISTRY",
        "Knows which outputs unpickled models can record.",
        _forget_recorded,
    )


def _forget_recorded() -> None:
    if _RECORDED:
        from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

        for name in _RECORDED:
            dict.pop(_CAN_RECORD_REGISTRY, name, None)
        _RECORDED.clear()


def _register(module: ModuleType) -> None:
    names = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")
    bases = tuple(getattr(module, name) for name in names if hasattr(module, name))
    for cls in [value for value in vars(module).values() if isinstance(value, type)]:
        if issubclass(cls, bases) and cls not in pytree.SUPPORTED_NODES:
            _CACHES.add(cls)
            register_by_attributes(cls, "layers")


def _register_batch(cls: Any) -> None:
    """Have pytrees take apart what tokenizers and processors return; where a token came from is not in a call."""
    if cls not in pytree.SUPPORTED_NODES:
        add_node(
            cls,
            lambda batch: (list(batch.data.values()), list(batch.data)),
            lambda values, names: cls(dict(zip(names, values))),
        )


def complete_unpickled(module: nn.Module) -> None:
    """Do for a model that was unpickled what its constructor does beside setting attributes."""
    for submodule in module.modules():
        if any(f"{cls.__module__}.{cls.__name__}" == _MODEL for cls in type(submodule).__mro__):
            from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

            # Without it output_hidden_states=True gives None. Keyed by the class's name in every version since 5.17.
            name = str(type(submodule))
            if name not in dict.keys(_CAN_RECORD_REGISTRY):
                _RECORDED.add(name)
            dict.__setitem__(_CAN_RECORD_REGISTRY, name, submodule._can_record_outputs)


def hand_caches_back(arguments: tuple[Any, ...], result: Any) -> None:
    """Have caches that were given to a call be those of its result, as where a forward writes into what it is given.

    Args:
        arguments: Of the call.
        result: Of the call; its ``past_key_values`` come from workers, in an object of their own.
    """
    returned = getattr(result, "past_key_values", None)
    if type(returned) not in _CACHES:
        return
    for given in arguments:
        if type(given) is type(returned):
            vars(given).clear()
            vars(given).update(vars(returned))
            result.past_key_values = given


def contains_cache(treespec: pytree.TreeSpec) -> bool:
    """Whether a cache is in a nesting, with or without tensors in it."""
    return treespec.type in _CACHES or any(map(contains_cache, treespec.children()))


def cache_leaves(treespec: pytree.TreeSpec) -> frozenset[int]:
    """Which leaves of a nesting are keys and values in a cache: (batch, heads, positions, width) each."""
    if not _CACHES:  # transformers is not imported; asking sys.modules would find it half imported by another thread
        return frozenset()
    cache_class = sys.modules["transformers.cache_utils"].Cache
    leaves = [torch.empty(0) for _ in range(treespec.num_leaves)]  # tensors: others are no children of a cache
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    entries = pytree.tree_leaves(
        pytree.tree_unflatten(leaves, treespec), is_leaf=lambda node: isinstance(node, cache_class)
    )
    inside = (leaf for entry in entries if isinstance(entry, cache_class) for leaf in pytree.tree_leaves(entry))
    return frozenset(numbers[id(leaf)] for leaf in inside)
