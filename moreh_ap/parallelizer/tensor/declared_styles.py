"""What a model says about its layers itself: in its tensor-parallel plan, in the source of its classes, by sharing.

Decides what is known before anything is guessed. Must not know ranks, or how anything is split.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from functools import cache

from torch import nn

from moreh_ap.parallelizer.tensor.structure import is_linear

_READS = re.compile(r"self\.(\w+)\.(?:weight|bias)\b(?!\.(?:dtype|device|shape|size|data)\b|\s*=[^=])")
"""Source that reads a layer's weight or bias, and not only of which kind it is."""
_TYPE_CHECK = re.compile(r"isinstance\([^()]*\)")


def used_directly(module: nn.Module) -> set[int]:
    """Returns the identities of linear layers whose weights the class around them reads, not only their outputs.

    Said by the source of the class; where it has none (a notebook), nothing is known.
    """
    found: set[int] = set()
    for parent in module.modules():
        layers = {name: child for name, child in parent.named_children() if is_linear(child)}
        if layers:
            names = _names_read(type(parent))  # type: ignore[arg-type]
            found.update(id(child) for name, child in layers.items() if name in names)
    return found


@cache
def _names_read(cls: type) -> frozenset[str]:
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return frozenset()
    return frozenset(_READS.findall(_TYPE_CHECK.sub("", source)))


def uses_of_parameters(module: nn.Module) -> Counter[int]:
    """Returns how many modules have each parameter, by its identity."""
    return Counter(id(p) for sub in module.modules() for p in sub._parameters.values() if p is not None)


def styles_of(module: nn.Module) -> dict[str, str]:
    """Returns the tensor-parallel styles that a model declares for its layers, by path with "*" for numbers.

    Source: transformers, `PreTrainedModel._tp_plan` and `PretrainedConfig.base_model_tp_plan`.
    """
    declared = dict(getattr(module, "_tp_plan", None) or {})
    base = dict(getattr(getattr(module, "config", None), "base_model_tp_plan", None) or {})
    prefix = getattr(module, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(module, prefix) else ""
    return {**{f"{inside}{path}": style for path, style in base.items()}, **declared}
