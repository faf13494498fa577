"""What hooks of the script find on a model: what was there when they ran on the workers.

Decides what is on the model while each hook runs where the script is. Must not know hooks, or how values were answered.
See [Note: moments] in `protocol/hook_records.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from moreh_ap.protocol.hook_records import ReportKey


class TakesAttributes(Protocol):
    """A model in the script."""

    def take_attributes(self, attributes: dict[str, Any]) -> None: ...


class ReplayedMoments:
    """What is on the modules of a model while the hooks of one call run.

    Args:
        root: The model.
        model: What takes its attributes.
        attributes: Those in the report of the call, see `Report`.

    Attributes:
        final: The attributes that are what they are after the forward, as `take_attributes` takes them.
    """

    def __init__(self, root: nn.Module, model: TakesAttributes, attributes: dict[str, Any]) -> None:
        self._root, self._model = root, model
        self.final: dict[str, Any] = {}
        self._set: dict[int, dict[str, Any]] = {}
        self._buffers: dict[int, dict[str, Tensor]] = {}
        self._passing: dict[str, Any] = {}
        self._replaced: list[tuple[dict[str, Any], str, Tensor, Any]] = []
        for text, value in attributes.items():
            key = ReportKey.of(text)
            if not key.is_passing:
                self.final[key.name + key.in_place] = value
            if key.position is None:
                continue
            path, _, last = key.name.rpartition(".")
            if last in root.get_submodule(path)._buffers:
                self._buffers.setdefault(key.position, {})[key.name] = value
            else:
                self._set.setdefault(key.position, {})[key.name + key.in_place] = value
                if key.is_passing and key.name not in self._passing:
                    self._passing[key.name] = vars(root.get_submodule(path)).get(last, self)

    def come_to(self, position: int) -> None:
        """Has the model be what the hook at this position found."""
        if position in self._set:
            self._model.take_attributes(self._set[position])
        self._put_back()
        for name, value in self._buffers.get(position, {}).items():
            path, _, last = name.rpartition(".")
            held = self._root.get_submodule(path)._buffers
            self._replaced.append((held, last, value, held[last]))
            held[last] = value

    def _put_back(self) -> None:
        for held, last, value, was in self._replaced:
            if held[last] is value:
                held[last] = was
        self._replaced.clear()

    def end(self) -> None:
        """Has the model be without what passed."""
        self._put_back()
        final = {ReportKey.of(name).name for name in self.final}
        for name, was in self._passing.items():
            path, _, last = name.rpartition(".")
            held = vars(self._root.get_submodule(path))
            if name in final:
                continue
            if was is self:
                held.pop(last, None)
            else:
                held[last] = was
