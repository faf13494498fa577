"""Lists and dicts of parameters among the arguments of a call, as MAML passes them to a network.

Decides what a forward gets in their place. Must not know how arguments travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class PassedParameterList(nn.ParameterList):
    """A list whose tensors stay what they are: PyTorch's would make parameters of them, cut off from their graph."""

    def __setitem__(self, idx: int, param: Any) -> None:
        _put(self, str(range(len(self))[idx]), param)


class PassedParameterDict(nn.ParameterDict):
    """The same for a dict."""

    def __setitem__(self, key: str, value: Any) -> None:
        self._keys[key] = None
        _put(self, key, value)


def _put(container: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        container._parameters[name] = value  # type: ignore[assignment]
    else:
        setattr(container, name, value)


Ways = tuple[Callable[[Any], tuple[list[Any], Any]], Callable[[Any, Any], Any]]
"""How an object is taken apart, into parts and what else it is, and put together."""

_OF_LISTS: Ways = (lambda value: (list(value), None), lambda parts, _: PassedParameterList(parts))
_OF_DICTS: Ways = (
    lambda value: (list(value.values()), tuple(value.keys())),
    lambda parts, keys: PassedParameterDict(dict(zip(keys, parts))),
)
WAYS: dict[type, Ways] = {
    nn.ParameterList: _OF_LISTS,
    PassedParameterList: _OF_LISTS,
    nn.ParameterDict: _OF_DICTS,
    PassedParameterDict: _OF_DICTS,
}
"""How containers of parameters nest."""
