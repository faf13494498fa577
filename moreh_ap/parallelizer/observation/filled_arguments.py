"""Hands on what a module puts into the dicts and lists that it is given, where it was given copies of them.

Decides which entries it has put there. Must not know what the copies were made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor

from moreh_ap.parallelizer.observation.torch_calls import leaves_of, map_leaves


class FilledArguments:
    """The dicts and lists among the arguments of a call, as they are before it.

    Args:
        given: The arguments of the caller.
        copies: What the module gets: the same, or made from `given` by `map_leaves`.
    """

    def __init__(self, given: Any, copies: Any) -> None:
        self._pairs = list(_containers(given, copies))
        self._before = [dict(_entries(copy)) for _, copy in self._pairs]

    def added(self) -> list[Tensor]:
        """Returns the tensors that the module has put into what it was given."""
        return [leaf for _, _, value in self._changes() for leaf in leaves_of(value) if isinstance(leaf, Tensor)]

    def hand_on(self, become: Callable[[Any], Any]) -> None:
        """Puts what the module has added into the arguments of the caller, and takes away what it has removed.

        Args:
            become: What stands in them for a leaf that the module has added.
        """
        for given, key, value in self._changes():
            if isinstance(given, list) and key == len(given):
                given.append(map_leaves(become, value))
            else:
                given[key] = map_leaves(become, value)
        for (given, copy), before in zip(self._pairs, self._before, strict=True):
            for key in sorted(before.keys() - dict(_entries(copy)).keys(), key=list(before).index, reverse=True):
                del given[key]

    def _changes(self) -> Iterator[tuple[Any, Any, Any]]:
        for (given, copy), before in zip(self._pairs, self._before, strict=True):
            for key, value in list(_entries(copy)):
                if key not in before or before[key] is not value:
                    yield given, key, value


def _entries(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, MutableMapping) else enumerate(container)


def _containers(given: Any, copy: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(given, dict) or type(given) is list:
        yield given, copy
    if isinstance(given, (dict, list, tuple)):
        keys = list(given) if isinstance(given, dict) else range(len(given))
        for key in keys:
            yield from _containers(given[key], copy[key])
