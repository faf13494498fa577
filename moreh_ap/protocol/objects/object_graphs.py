"""Objects that lead back to themselves, taken apart as a whole: their tensors, and a pickle of everything around them.

A pytree cannot say that a part is the whole again, as in a graph whose storage knows the graph; a pickle can. Decides
nothing about which objects are treated so.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class ObjectGraph:
    """An object without its tensors.

    Attributes:
        pickled: Its pickle, in which each tensor is a number.
    """

    pickled: bytes

    def fill(self, tensors: Iterable[Tensor]) -> Any:
        """Returns another object with equal attributes and `tensors` in it."""
        return _Filler(io.BytesIO(self.pickled), list(tensors)).load()


def take_apart(value: Any) -> tuple[list[Tensor], ObjectGraph]:
    """Returns the tensors of an object, each once, and the rest.

    Raises:
        pickle.PicklingError: It contains a module, or something else that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return list(pickler.tensors.values()), ObjectGraph(file.getvalue())


def class_in_circle(tree: Any, may_be: Callable[[type], bool]) -> type | None:
    """Returns the class of the outermost object in `tree` that leads back to itself, of those that `may_be` accepts."""

    def visit(value: Any, above: dict[int, Any]) -> type | None:
        if id(value) in above:
            circle = list(above.values())[list(above).index(id(value)) :]
            return next((type(one) for one in circle if may_be(type(one))), None)
        inside = _parts_of(value)
        below = {**above, id(value): value}
        return next(filter(None, (visit(part, below) for part in inside)), None)

    return visit(tree, {})


def _parts_of(value: Any) -> Sequence[Any]:
    is_leaf = iter((False,))  # asked of the value first, then of each part
    parts = pytree.tree_leaves(value, is_leaf=lambda _: next(is_leaf, True))
    return () if len(parts) == 1 and parts[0] is value else parts


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers: dict[int, int] = {}
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, nn.Module):
            raise pickle.PicklingError("modules are parts of a model, not of an argument")
        if not isinstance(obj, Tensor):
            return None
        self.tensors[id(obj)] = obj
        return self._numbers.setdefault(id(obj), len(self._numbers))


class _Filler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]
