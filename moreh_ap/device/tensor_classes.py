"""Tensors on the accelerator that are of a library's own class: ``picture.cuda()`` stays a `TensorImage`.

For each such class there is one of ours, derived from it and from `VirtualTensor`: to the library its own, with its own
`__torch_function__`; to us a virtual tensor. Knows no library. What a library keeps in the attributes of a tensor, or
puts in their place (``tensor.__dict__ = ...``), is its own: the value has slots.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from moreh_ap.device.tensor import ORDINARY, VirtualTensor
from moreh_ap.patching import Patches

_HIDDEN = ("_cell", "_user")


class _Wanted(threading.local):
    """The class of the alias that this thread is making of a virtual tensor."""

    kind: type[ClassedTensor] | None = None


WANTED = _Wanted()
"""Read where an alias is made (`operations`)."""


class ClassedTensor(VirtualTensor):
    """A virtual tensor whose class is derived from a library's, `library_class`, too."""

    __slots__ = _HIDDEN

    library_class: type[Tensor] = Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gives results the class, as `torch.Tensor.__torch_function__` does."""
        result = func.result if type(func) is _Computed else super().__torch_function__(func, types, args, kwargs)
        if result is NotImplemented or func in torch.overrides.get_default_nowrap_functions():
            return result
        return with_class(result, cls)

    def as_plain(self) -> Tensor:
        """Returns an ordinary tensor of the library's class, with its attributes."""
        with torch._C.DisableTorchFunctionSubclass():
            plain = super().as_plain().as_subclass(self.library_class)
        vars(plain).update((name, value) for name, value in vars(self).items() if name not in _HIDDEN)
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                made = super().__deepcopy__(memo)
            memo[id(self)] = made = made.as_subclass(type(self))  # type: ignore[assignment]
            made.__dict__ = copy.deepcopy({k: v for k, v in vars(self).items() if k not in _HIDDEN}, memo)
        return memo[id(self)]  # type: ignore[no-any-return]


@functools.cache
def _metaclass(of_library: type[type]) -> type[type]:
    """Returns a class of classes of ours: each is equal to the library's, so that tables find ``type(tensor)``."""

    def __eq__(cls: type, other: object) -> bool:
        return isinstance(other, type) and _own_library_class(cls) is _own_library_class(other)

    def __hash__(cls: type) -> int:
        own = _own_library_class(cls)
        return type.__hash__(cls) if own is cls else hash(own)

    body = {"__eq__": __eq__, "__hash__": __hash__}
    return types.new_class(of_library.__name__, (of_library,), exec_body=lambda own: own.update(body))


def _own_library_class(kind: type) -> type:
    """Returns the library's class that one of ours replaces; any other class, also a derived one, itself."""
    own: type = vars(kind).get("library_class", kind) if kind is not ClassedTensor else kind
    return own


@functools.cache
def class_on_accelerator(kind: type[Tensor]) -> type[ClassedTensor]:
    """Returns the class of tensors on the accelerator that replaces the library's class `kind`."""
    is_ordinary = kind in ORDINARY
    bases = (ClassedTensor,) if is_ordinary else (kind, ClassedTensor)
    settings = {} if is_ordinary else {"metaclass": _metaclass(cast(Any, type(kind)))}
    body = {"__slots__": (), "library_class": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made = types.new_class(kind.__name__, bases, settings, exec_body=lambda own: own.update(body))
    return cast(type[ClassedTensor], made)


def _library_class(kind: type[Tensor]) -> type[Tensor]:
    """Returns which class a tensor has to a library that asked for `kind`: ``type(other)`` may be one of ours."""
    return getattr(kind, "library_class", Tensor) if issubclass(kind, VirtualTensor) else kind


def with_class(result: Any, kind: type[Tensor]) -> Any:
    """Returns `result` with tensors of `kind` in place of those without a class of a library's."""
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
        return result  # `tree_map` would make a tuple of a `torch.Size`
    library_class = _library_class(kind)

    def converted(leaf: Any) -> Any:
        is_other = isinstance(leaf, Tensor) and not isinstance(leaf, library_class)
        return leaf.as_subclass(kind) if is_other and not isinstance(leaf, torch.nn.Parameter) else leaf

    return tree_map(converted, result)


def is_classed(kinds: Any) -> bool:
    """Returns whether classes of tensors are asked, and a library's is among those of a function's arguments."""
    return torch._C._is_torch_function_enabled() and any(
        isinstance(kind, type) and issubclass(kind, Tensor) and kind not in ORDINARY for kind in kinds
    )


def call_classed(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a function as PyTorch does: the first class that has an answer decides."""
    for kind in types:
        result = kind.__torch_function__(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
    raise TypeError(f"no implementation found for {func!r} on types that implement __torch_function__: {list(types)}")


def result_of_module(result: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns what workers have computed of tensors of a library's class as its `__torch_function__` gives it back."""
    types = list(dict.fromkeys(type(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ClassedTensor)))
    return call_classed(_Computed(result), types, args, kwargs)


class _Computed:
    """A function whose result is known."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.result


def install(patches: Patches) -> None:
    """Has tensors on the accelerator become tensors of a library's class."""
    group = patches.group("Libraries give tensors a class of their own, on every device.")

    def as_subclass(self: Tensor, cls: type[Tensor]) -> Tensor:
        """Returns a tensor of the class, on the accelerator, made of another tensor on the accelerator."""
        library_class = _library_class(cls)
        outer, WANTED.kind = WANTED.kind, class_on_accelerator(library_class)
        try:
            return original(self, library_class)  # type: ignore[no-any-return]
        finally:
            WANTED.kind = outer

    original = group.replace(Tensor, "as_subclass", as_subclass)
