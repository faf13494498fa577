"""The value of a virtual tensor: in the controller, in a file, promised by workers, or still to be computed.

This module decides how values are read and when a small computation may be deferred. It must not know how workers are
reached: `moreh_ap.session` defines further subclasses of `Value` for values on the workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moreh_ap.protocol.tensor_source import TensorSource

MAX_DEFERRED_ELEMENTS = 4096  # larger tensors are computed at once: deferring them would only keep memory alive

MIN_DIMS_OF_UNKNOWN_ORDER = 4  # `channels_last` is an order of pictures and videos


class Value:
    """The source of a virtual tensor's numbers."""

    __slots__ = ("__weakref__",)

    #: The session whose workers hold the value as state (parameters, gradients, ...), or None.
    owner: Any = None

    #: Whether the value stays where it is when it is read.
    stays: bool = False

    #: Whether each `read` returns memory of its own.
    reads_copies: bool = False

    def runner(self) -> Callable[[Any, Any, Any], Any] | None:
        """Runs operations at the value's place: called with (func, args, kwargs), it may return NotImplemented."""
        return None

    def ready(self) -> bool:
        """Returns whether `read` would return without waiting for a worker."""
        raise NotImplementedError

    def is_order_known(self) -> bool:
        """Returns whether the dims of the value will lie in memory as those of its tensor say."""
        return True

    def read(self) -> Tensor:
        """Returns the full value as a CPU tensor; may wait. The caller must not change it without calling `write`."""
        raise NotImplementedError

    def write(self, tensor: Tensor) -> None:
        """Stores a changed value where it came from. Values that become `Here` once read do not need it."""
        raise TypeError(f"{type(self).__name__} values are replaced, not written")


class Here(Value):
    """A CPU tensor of the controller. Views and in-place operations act on it directly."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def ready(self) -> bool:
        return True

    def read(self) -> Tensor:
        return self.tensor


class InFile(Value):
    """A tensor in safetensors files that has not been read yet.

    Args:
        sources: Its files: one file has all of it, or each of several files has a box of it.
        shape: Its shape.
        dtype: The dtype to which it is cast when it is read.
        keeper: An object that must live as long as the files may be read.
    """

    __slots__ = ("_keeper", "_shape", "dtype", "sources")

    stays = True

    def __init__(
        self, sources: tuple[TensorSource, ...], shape: tuple[int, ...], dtype: torch.dtype, keeper: object = None
    ) -> None:
        self.sources, self._shape, self.dtype, self._keeper = sources, shape, dtype, keeper

    def cast(self, dtype: torch.dtype) -> InFile:
        """Returns the same tensor in another dtype, without reading it."""
        return InFile(self.sources, self._shape, dtype, self._keeper)

    def ready(self) -> bool:
        return True

    def read(self) -> Tensor:
        whole = torch.empty(self._shape, dtype=self.dtype, device="cpu")
        read_into([("a tensor", whole, source) for source in self.sources])
        return whole


def read_into(places: Sequence[tuple[str, Tensor, TensorSource]]) -> None:
    """Reads values, or boxes of values, from files into tensors on the CPU; opens each file once.

    Args:
        places: What errors call the tensor, the tensor, and where its value, or a box of it, lies.

    Raises:
        LoadError: A file cannot be read, has no such tensor, or the shapes differ.
    """
    from moreh_ap.parallelizer.state.loading import Wanted, read

    read([Wanted(name, tensor, source) for name, tensor, source in places])


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments of an ATen operation, and in place of a list what is in it: they nest no deeper."""
    leaves: list[Any] = []
    for arg in (*args, *kwargs.values()):
        if type(arg) is list or type(arg) is tuple:
            leaves += arg
        else:
            leaves.append(arg)
    return leaves


def mapped(
    kind: type[Any], function: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of an ATen operation with what `function` returns in place of each object of a class."""
    found: list[Any] = []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, kind):
            found.append(function(arg))
        elif type(arg) is list or type(arg) is tuple:
            found.append([])
            for each in arg:
                found[-1].append(function(each) if isinstance(each, kind) else each)
        else:
            found.append(arg)
    return tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :]))


class Later(Value):
    """A small operation on values, some of which are still promises; computed when its result is read.

    A script that never reads (``total += loss``, step after step) chains them: links are computed as soon as
    possible, so that a chain is no longer than workers lag behind, and without recursion, for which Python's stack
    would be too short.
    """

    __slots__ = ("_inputs", "_operation", "_result")

    def __init__(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._operation: tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]] | None = (func, args, kwargs)
        self._inputs = [leaf for leaf in leaves_of(args, kwargs) if isinstance(leaf, Value)]
        self._result: Tensor | None = None

    def ready(self) -> bool:
        return self._compute_chain(wait=False)

    def is_order_known(self) -> bool:
        return all(value.is_order_known() for value in self._inputs)

    def read(self) -> Tensor:
        self._compute_chain(wait=True)
        assert self._result is not None
        return self._result

    def _compute_chain(self, wait: bool) -> bool:
        """Computes this value and its inputs, oldest first; without `wait` only those whose inputs are ready.

        Returns:
            Whether this value is computed.
        """
        chain: list[Later] = [self]
        while chain:
            length, are_ready = len(chain), True
            for value in chain[-1]._inputs:
                if isinstance(value, Later) and value._operation is not None:
                    chain.append(value)
                elif not wait:
                    are_ready = are_ready and value.ready()
            if len(chain) > length:
                continue
            if not are_ready:
                return False
            chain.pop()._compute()
        return True

    def _compute(self) -> None:
        operation = self._operation
        if operation is not None:
            func, args, kwargs = operation
            args, kwargs = mapped(Value, lambda value: value.read(), args, kwargs)
            self._result = func(*args, **kwargs)
            self._operation, self._inputs = None, []


class View(Value):
    """A view of a value outside of the controller: reading applies the view, writing writes the base."""

    __slots__ = ("_base", "_user", "_view")

    stays = True

    def __init__(self, base: Cell, view: Callable[[Tensor], Tensor]) -> None:
        self._base, self._view = base, view
        self._user = base.new_user()

    @property
    def base(self) -> Cell:
        """The cell that it is a view of."""
        return self._base

    def ready(self) -> bool:
        return self._base.value.ready()

    def read(self) -> Tensor:
        return self._view(self._base.value.read())

    def write(self, tensor: Tensor) -> None:
        value = self._base.value
        whole = value.read() if value.stays else self._base.read_here().tensor
        self._view(whole).copy_(tensor)
        if value.stays:
            value.write(whole)


class CellUser:
    """A reference of a tensor or view to its cell, with the same lifetime."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> Any:
        return _nothing, ()  # as a cell


class Cell:
    """The slot that aliases of one virtual tensor share: in-place operations put a new value into it.

    An object that keeps a cell to read its value later also keeps a user of it (`new_user`).
    """

    __slots__ = ("_users", "device", "has_views", "value")

    def __init__(self, value: Value, device: torch.device) -> None:
        self.value, self.device = value, device
        self.has_views = False  # True once another cell shares the memory: then the value must not be replaced
        self._users: tuple[weakref.ref[CellUser], ...] = ()

    def __reduce__(self) -> Any:
        """Libraries copy the attributes of tensors to others: such a copy is of no use, and is not saved."""
        return _nothing, ()

    def new_user(self) -> CellUser:
        """Returns a user of this cell; the caller keeps it as long as it keeps the cell."""
        user = CellUser()
        if self._users:
            self._users = (*(known for known in self._users if known() is not None), weakref.ref(user))
        else:
            self._users = (weakref.ref(user),)
        return user

    def has_others(self, user: CellUser) -> bool:
        """Returns whether the cell has another user than `user`: an alias or a view."""
        return any(known() not in (None, user) for known in self._users)

    def settle(self) -> Value:
        """Returns the value, as `Here` if it is ready without waiting and no other object keeps it."""
        value = self.value
        if isinstance(value, Here) or value.stays or not value.ready():
            return value
        return self.read_here()

    def read_here(self) -> Here:
        """Reads the value, waiting for it, and keeps it in the controller from now on."""
        if not isinstance(self.value, Here):
            with torch.inference_mode(False):  # whoever reads it first, others may compute gradients with it
                tensor = self.value.read()
                # Another tensor may have deferred an operation on this value: a private copy keeps the old numbers.
                self.value = Here(tensor.clone() if tensor.numel() <= MAX_DEFERRED_ELEMENTS else tensor)
        return self.value


def _nothing() -> None:
    return None
