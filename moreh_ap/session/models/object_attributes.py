"""Objects that forwards have set on the workers' modules (``self.criterion = Criterion(self)``), copied for the script.

Decides when such a copy has changed in the script, so that the workers get it. Must not know workers or messages.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from moreh_ap.device.tensor import ACCELERATOR
from moreh_ap.protocol.skeleton import pickle_object, unpickle_object


class ObjectAttributes:
    """The copies that the script has.

    Args:
        root: The model.
        path_of: The path of each of its modules, by `id`.
    """

    def __init__(self, root: nn.Module, path_of: dict[int, str]) -> None:
        self._root, self._path_of = root, path_of
        self.known: dict[tuple[str, str], tuple[Any, bytes]] = {}

    def put(self, answers: list[dict[str, bytes]]) -> set[str]:
        """Sets attributes to copies of what all workers have alike; returns their full names.

        Args:
            answers: What each worker has, by full name. Where workers differ, they have set what their rows led to.
        """
        first, *others = answers
        alike = {name: data for name, data in first.items() if all(other.get(name) == data for other in others)}
        for name, pickled in alike.items():
            path, _, last = name.rpartition(".")
            value = unpickle_object(pickled, self._root, ACCELERATOR)
            vars(self._root.get_submodule(path))[last] = value
            self.known[path, last] = value, self._pickled(value)
        return set(alike)

    def take_changes(self) -> list[tuple[str, str, Any]]:
        """Returns path, name and value of the copies that the script has changed since the last call."""
        changes = []
        for key, (value, pickled) in list(self.known.items()):
            path, last = key
            if vars(self._root.get_submodule(path)).get(last) is not value:
                del self.known[key]  # another one was set, and setting it is noticed
                continue
            now = self._pickled(value)
            if now != pickled:
                changes.append((path, last, value))
                self.known[key] = value, now
        return changes

    def _pickled(self, value: Any) -> bytes:
        return pickle_object(value, self._path_of, ACCELERATOR)
