"""How results nest: what PyTorch's pytrees know, and the user's own dataclasses.

Decides that every tensor of a result is found. Must not know what is done with the leaves.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import warnings
from typing import Any

import cloudpickle
import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from moreh_ap.errors import UnsupportedError


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and nesting of `tree`; dataclasses nest by their fields.

    Raises:
        UnsupportedError: A leaf is an object with tensors inside that nobody knows how to take apart.
    """
    leaves, treespec = pytree.tree_flatten(tree)
    strangers = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
    if strangers:
        for cls in strangers:
            register(cls)
        return flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and _hides_tensors(leaf):
            raise UnsupportedError(
                f"A {type(leaf).__name__} with tensors inside was passed to or returned by a model.",
                allowed="Tensors in tuples, lists, dicts, named tuples, dataclasses and transformers outputs.",
                fix="return a tuple, a dict or a dataclass",
            )
    return leaves, treespec


def register(cls: Any) -> None:
    """Make pytrees take instances of a dataclass apart by their fields."""
    if cls in pytree.SUPPORTED_NODES:
        return
    names = [field.name for field in dataclasses.fields(cls)]

    def take_apart(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    def put_together(values: Any, context: None) -> Any:
        made = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    pytree.register_pytree_node(cls, take_apart, put_together)


def register_containers(treespec: TreeSpec) -> None:
    """Make known the dataclasses of a nesting that another process took apart."""
    if dataclasses.is_dataclass(treespec.type):
        register(treespec.type)
    for child in treespec.children():
        register_containers(child)


def _hides_tensors(value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return False
    search = _TensorSearch(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
    try:
        search.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False  # what cannot be pickled is refused where it would have to travel
    return search.found


class _TensorSearch(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
    """Pickles a value only to see whether a tensor is inside."""

    found = False

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self.found = True
            return "tensor"
        return None


def pickle_treespec(treespec: TreeSpec) -> bytes:
    """`treespec` as bytes; container classes defined in ``__main__`` travel by value."""
    data: bytes = cloudpickle.dumps(treespec)
    return data


def unpickle_treespec(data: bytes) -> TreeSpec:
    """The inverse of `pickle_treespec`."""
    with warnings.catch_warnings():
        # PyTorch's own pickle of a leaf asks for a class that it calls deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        treespec: TreeSpec = pickle.loads(data)
        register_containers(treespec)
    return treespec
