"""What a forward keeps in attributes for the next one: ``self.hidden = hidden``.

Decides how it is noticed that a forward reads it, and how a forward is given it. Must not know who keeps it.

[Note: kept values]
In a split call each worker sets an attribute to its rows, or to its share of a sum, of what one device would have.
That does no harm while no forward reads it (weights of attention, a loss). To a forward that does, it is passed as one
more argument: it is cut as arguments are, proven with them, and gradients go back through it to the call that set it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

KEPT = "attributes that earlier forwards have set"
"""The keyword under which they are passed, ``{path and name: value}``; no forward has an argument of that name."""


def split_kept(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of the forward itself, and the attributes passed with them."""
    return {name: value for name, value in kwargs.items() if name != KEPT}, kwargs.get(KEPT, {})


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Sets an attribute of a part of the module, such as ``encoder.hidden``."""
    attributes, last = _place_of(module, name)
    attributes[last] = value


def _place_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, last = name.rpartition(".")
    return vars(module.get_submodule(path)), last


class Reads:
    """Inside, it is noticed whether a forward reads attributes; they are cut off from what computed them.

    The attributes are not put back.

    Args:
        module: The model.
        names: Its attributes to watch.

    Attributes:
        found: Those that were read.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self._module, self._names = module, names
        self.found: set[str] = set()

    def __enter__(self) -> Reads:
        for name in self._names:
            attributes, last = _place_of(self._module, name)
            if last in attributes:
                attributes[last] = tree_map_only(Tensor, self._watcher(name), attributes[last])
        return self

    def __exit__(self, *exc: object) -> None:
        for name in self._names:
            attributes, last = _place_of(self._module, name)
            for leaf in tree_leaves(attributes.get(last)):
                if isinstance(leaf, _Watched):
                    leaf.on_read = None

    def _watcher(self, name: str) -> Callable[[Tensor], _Watched]:
        def watched(value: Tensor) -> _Watched:
            made = value.detach().as_subclass(_Watched)
            made.on_read = lambda: self.found.add(name)
            return made

        return watched


class _Watched(Tensor):
    """A tensor that says when something is computed from it; what is, is an ordinary tensor."""

    on_read: Callable[[], object] | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, _Watched) and leaf.on_read is not None:
                leaf.on_read()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
