"""Caches among the arguments of calls of transformers models: where they are, and how none is filled."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from moreh_ap.integrations import transformers_worker
from moreh_ap.protocol.messages.tensors import TensorSlot
from moreh_ap.protocol.pytree import Nesting


def cache_tensors(nesting: Nesting) -> list[int]:
    """Which of the tensors of a call are keys and values in a cache."""
    slots = [leaf for leaf, value in enumerate(nesting.leaves) if isinstance(value, TensorSlot)]
    in_cache = transformers_worker.cache_leaves(nesting.treespec)
    return [index for index, leaf in enumerate(slots) if leaf in in_cache]


def without_cache(called: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that keep a transformers model, or the submodule or method that is called, from filling a
    cache.

    In training it is not read. Stages of a pipeline would have different parts of it, and a block that is computed
    again would fill it twice: transformers switches it off too when it recomputes.
    """
    return {**kwargs, "use_cache": False} if _takes(called, "use_cache") else kwargs


def _takes(called: Callable[..., Any], keyword: str) -> bool:
    """Whether a method or a module's `forward` has an argument of this name, or hands on whatever it gets to a part
    that has (PEFT does)."""
    parts = list(called.children()) if isinstance(called, nn.Module) else []
    parameters = inspect.signature(getattr(called, "forward", called)).parameters
    hands_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return keyword in parameters or (hands_on and any(_takes(submodule, keyword) for submodule in parts))
