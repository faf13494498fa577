"""Tables whose keys are objects, each of which is equal to itself alone, and which do not keep them alive.

Decides what is known of an object that may compare itself with others in a way of its own, as modules of TensorDict do,
whose `==` gives no truth value. Must not know what is kept.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class IdentityTable(MutableMapping[Key, Value], Generic[Key, Value]):
    """A `weakref.WeakKeyDictionary` that never asks whether two keys are equal.

    Example:
        >>> class Anything:
        ...     def __eq__(self, other): raise RuntimeError
        >>> key, table = Anything(), IdentityTable()
        >>> table[key] = 1
        >>> table[key] = 2
        >>> table[key], Anything() in table
        (2, False)
        >>> del key
        >>> len(table)
        0
    """

    def __init__(self) -> None:
        #: References to the keys and their values, by the keys' `id`: for callers that look up often.
        self.by_id: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def __getitem__(self, key: Key) -> Value:
        return self.by_id[id(key)][1]

    def __setitem__(self, key: Key, value: Value) -> None:
        known = self.by_id.get(id(key))
        self.by_id[id(key)] = (known[0] if known else self._reference(key)), value

    def __delitem__(self, key: Key) -> None:
        del self.by_id[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self.by_id

    def __iter__(self) -> Iterator[Key]:
        return iter([key for reference, _ in list(self.by_id.values()) if (key := reference()) is not None])

    def __len__(self) -> int:
        return len(self.by_id)

    def get(self, key: Key, default: Any = None) -> Any:
        """Returns the value of a key, or else `default`."""
        known = self.by_id.get(id(key))
        return default if known is None else known[1]

    def clear(self) -> None:
        """Forgets all keys."""
        self.by_id.clear()

    def _reference(self, key: Key) -> weakref.ref[Any]:
        return weakref.ref(key, functools.partial(_forget, self.by_id, id(key)))


def _forget(entries: dict[int, Any], number: int, _: Any) -> None:
    """Removes an object that is gone: its number may soon be another's."""
    entries.pop(number, None)
