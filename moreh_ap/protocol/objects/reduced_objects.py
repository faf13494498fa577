"""How objects of some classes are pickled so that a worker can make them.

Decides in which order such an object gets its attributes and items. Must not know what it belongs to.
"""

from __future__ import annotations

import copyreg
from typing import Any


def with_attributes_first(container: Any, reduced: Any) -> Any:
    """`reduced`, but a container of a class whose own methods put items in has its attributes before them."""
    is_plain = all(getattr(type(container), name, None) in _OF_CONTAINERS for name in ("extend", "__setitem__"))
    if is_plain or reduced[0] is not copyreg.__newobj__ or hasattr(container, "__setstate__"):  # type: ignore[attr-defined]
        return reduced
    made, arguments, attributes, *_ = reduced
    items = list(container) if isinstance(container, list) else dict(container)
    return made, arguments, (attributes, items), None, None, _fill_container


def asking_nothing(obj: Any, reduced: Any) -> Any:
    """`reduced`, but a class with a `__getattr__` is not asked for `__setstate__` while its object has no attributes.

    Such a method often reads one of them, which would ask for it again, without end (`DynamicBackend` of Keras).
    """
    kind = type(obj)
    asks = any("__getattr__" in vars(base) for base in kind.__mro__) and not hasattr(kind, "__setstate__")
    if not asks or not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced
    made, arguments, attributes, *items = reduced
    if type(attributes) is not dict or any(one is not None for one in items):
        return reduced
    return made, arguments, attributes, None, None, _set_attributes


def _set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    vars(obj).update(attributes)


_OF_CONTAINERS = (None, list.extend, list.__setitem__, dict.__setitem__)


def _fill_container(container: Any, given: Any) -> None:
    attributes, items = given
    if attributes:
        vars(container).update(attributes)
    if isinstance(container, list):
        list.extend(container, items)
    else:
        dict.update(container, items)
