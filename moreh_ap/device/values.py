"""What a virtual tensor holds: a value that is here, in a file, promised by workers, or still to be computed.

This module decides how values are read and when a small computation may be put off. It must not know how workers are
reached: values that live on workers are defined by `moreh_ap.session` as further subclasses of `Value`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from moreh_ap.protocol.tensor_source import TensorSource

MAX_DEFERRED_ELEMENTS = 4096  # larger tensors are computed at once: putting them off would only keep memory alive


class Value:
    """Where the numbers of a virtual tensor come from."""

    __slots__ = ("__weakref__",)

    #: The session whose workers hold the value as state (parameters, gradients, ...), or None.
    owner: Any = None

    #: True if a handle leaves the value where it is when somebody reads it.
    stays: bool = False

    def runner(self) -> Callable[[Any, Any, Any], Any] | None:
        """What runs operations where the value lies: called with (func, args, kwargs), it may answer NotImplemented."""
        return None

    def ready(self) -> bool:
        """True if `read` would return without waiting for a worker."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """The whole value as a CPU tensor; waits if it must. The caller must not change it unless `write` is given."""
        raise NotImplementedError

    def write(self, tensor: Tensor) -> None:
        """Store a changed value back where it came from. Values that turn into `Here` once read never need it."""
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
    """A tensor of safetensors files that nobody has read yet.

    Args:
        sources: Where it lies: one file has all of it, or each of several a box of it.
        shape: Its shape.
        dtype: What whoever reads it casts it to.
        keeper: An object that must live as long as somebody may read the files.
    """

    __slots__ = ("_keeper", "_shape", "dtype", "sources")

    stays = True

    def __init__(
        self, sources: tuple[TensorSource, ...], shape: tuple[int, ...], dtype: torch.dtype, keeper: object = None
    ) -> None:
        self.sources, self._shape, self.dtype, self._keeper = sources, shape, dtype, keeper

    def cast(self, dtype: torch.dtype) -> InFile:
        """The same tensor in another dtype, not read either."""
        return InFile(self.sources, self._shape, dtype, self._keeper)

    def ready(self) -> bool:
        return True

    def read(self) -> Tensor:
        from moreh_ap.parallelizer.state.loading import Wanted, read

        whole = torch.empty(self._shape, dtype=self.dtype, device="cpu")
        read(Wanted("a tensor", whole, source) for source in self.sources)
        return whole


class Later(Value):
    """A small operation on values of which some are still promised; computed when somebody reads it.

    A script that never reads (``total += loss``, step after step) chains them: links are computed as soon as they can
    be, so that a chain is no longer than workers lag behind, and none is reached by recursion, for which Python's
    stack would be too short.
    """

    __slots__ = ("_inputs", "_operation", "_result")

    def __init__(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._operation: tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]] | None = (func, args, kwargs)
        self._inputs: list[Value] = []
        tree_map_only(Value, self._inputs.append, (args, kwargs))
        self._result: Tensor | None = None

    def ready(self) -> bool:
        return self._compute_chain(wait=False)

    def read(self) -> Tensor:
        self._compute_chain(wait=True)
        assert self._result is not None
        return self._result

    def _compute_chain(self, wait: bool) -> bool:
        """Computes this and what it needs, oldest first; without `wait` only as far as that can be done at once.

        Returns:
            Whether this one is computed.
        """
        chain: list[Later] = [self]
        while chain:
            inputs = chain[-1]._inputs
            needed = [value for value in inputs if isinstance(value, Later) and value._operation is not None]
            if needed:
                chain += needed
            elif wait or all(value.ready() for value in inputs):
                chain.pop()._compute()
            else:
                return False
        return True

    def _compute(self) -> None:
        operation = self._operation
        if operation is not None:
            func, args, kwargs = tree_map_only(Value, lambda value: value.read(), operation)
            self._result = func(*args, **kwargs)
            self._operation, self._inputs = None, []


class View(Value):
    """A view of a value that is not here: reading applies the view, writing writes the base."""

    __slots__ = ("_base", "_user", "_view")

    stays = True

    def __init__(self, base: Cell, view: Callable[[Tensor], Tensor]) -> None:
        self._base, self._view = base, view
        self._user = base.new_user()

    @property
    def base(self) -> Cell:
        """What it is a view of."""
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
    """A tensor or view on a cell; lives as long as it is one."""

    __slots__ = ("__weakref__",)


class Cell:
    """The place that aliases of one virtual tensor share: in-place operations put a new value into it.

    Whoever keeps a cell to read its value later also keeps a user of it (`new_user`).
    """

    __slots__ = ("_users", "device", "has_views", "value")

    def __init__(self, value: Value, device: torch.device) -> None:
        self.value, self.device = value, device
        self.has_views = False  # True once another cell looks at the same memory: the value may not be replaced then
        self._users: tuple[weakref.ref[CellUser], ...] = ()

    def new_user(self) -> CellUser:
        """A user of this cell, which the caller keeps as long as it keeps the cell."""
        user = CellUser()
        self._users = (*(known for known in self._users if known() is not None), weakref.ref(user))
        return user

    def has_others(self, user: CellUser) -> bool:
        """Whether the cell has a user beside `user`: an alias or a view."""
        return any(known() not in (None, user) for known in self._users)

    def settle(self) -> Value:
        """The value, turned into `Here` if it can be had without waiting and nobody else keeps it."""
        value = self.value
        if isinstance(value, Here) or value.stays or not value.ready():
            return value
        return self.read_here()

    def read_here(self) -> Here:
        """Read the value (waiting if it must) and keep it here from now on."""
        if not isinstance(self.value, Here):
            with torch.inference_mode(False):  # whoever reads it first, others may compute gradients with it
                tensor = self.value.read()
                # Another tensor may have put off an operation on this very value: a private copy keeps it as it was.
                self.value = Here(tensor.clone() if tensor.numel() <= MAX_DEFERRED_ELEMENTS else tensor)
        return self.value
