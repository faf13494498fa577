"""How arguments and results nest: what PyTorch's pytrees know, dataclasses, and other objects that can be pickled.

Decides that every tensor is found. Must not know what is done with the leaves. PyTorch's table of classes is the one of
the process; `install` has what is added to it taken back.

[Note: objects]
A batch of a data library or a `torch.distributions.Normal` is taken apart as pickle would do it: what its class is made
with, and its state, nest on. What is put together again is another object with equal attributes. Objects that lead back
to themselves do not nest: of their classes, `object_graphs` takes every object apart as a whole.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches
from moreh_ap.protocol.messages.tensors import TensorSlot
from moreh_ap.protocol.objects import object_graphs, parameter_containers
from moreh_ap.protocol.objects.object_graphs import ObjectGraph

_PROTOCOL = 2  # the first by which an object is its class, arguments of `__new__`, and state

_ADDED: list[type] = []
_NUMBERS = itertools.count()


def install(patches: Patches) -> None:
    """Have the classes that are added to PyTorch's pytrees from now on removed by the undoing."""
    group = patches.group("Arguments and results of a model travel between controller and workers leaf by leaf.")
    group.note(
        "torch.utils._pytree.SUPPORTED_NODES",
        "Takes apart dataclasses and other objects among them, and caches and batches of transformers.",
        _remove_added,
    )

    def make_packed_sequence(
        cls: type, data: Any, batch_sizes: Any = None, sorted_indices: Any = None, unsorted_indices: Any = None
    ) -> Any:
        """Makes a packed sequence whose batch sizes, which PyTorch takes on the CPU alone, come from a device."""
        sizes = batch_sizes.cpu() if isinstance(batch_sizes, torch.Tensor) else batch_sizes
        return make(cls, data, sizes, sorted_indices, unsorted_indices)

    make = group.replace(PackedSequence, "__new__", make_packed_sequence)


def _remove_added() -> None:
    unpickle_treespec.cache_clear()
    _BY_ATTRIBUTES.clear()
    _AS_WHOLE.clear()
    while _ADDED:
        cls = _ADDED.pop()
        if cls in pytree.SUPPORTED_NODES:
            pytree._deregister_pytree_node(cls)


def add_node(cls: type, take_apart: Callable[[Any], Any], put_together: Callable[[Any, Any], Any]) -> None:
    """Add a class to the pytrees of PyTorch's Python code, from which it can be removed again."""
    # The name is for exporting a nesting as JSON, which we do not; removing a class requires one of its own.
    name = f"moreh_ap.{next(_NUMBERS)}"
    pytree._private_register_pytree_node(cls, take_apart, put_together, serialized_type_name=name)
    _ADDED.append(cls)


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and nesting of `tree`; dataclasses nest by their fields, objects as [Note: objects] says.

    Raises:
        UnsupportedError: A leaf is an object with tensors inside that cannot be taken apart.
    """
    while True:
        try:
            leaves, treespec = pytree.tree_flatten(tree)
        except RecursionError:
            circular = object_graphs.class_in_circle(tree, _ADDED.__contains__)
            if circular is None:
                raise _refusal("An object", "that leads back to itself") from None
            _register_as_whole(circular)
            continue
        except pickle.PicklingError:
            raise _refusal("An object with a module inside", "that leads back to itself") from None
        strangers = [leaf for leaf in leaves if _is_stranger(leaf)]
        if not strangers:
            return leaves, treespec
        for leaf in strangers:
            if not dataclasses.is_dataclass(leaf) and not _is_reducible(leaf):
                raise _refusal(f"A {type(leaf).__name__}", "with tensors inside")
            register(type(leaf))


def _is_stranger(leaf: Any) -> bool:
    if isinstance(leaf, (torch.Tensor, type, torch.Generator)):  # PyTorch takes no generator apart
        return False
    return dataclasses.is_dataclass(leaf) or _hides_tensors(leaf)


def _is_reducible(value: Any) -> bool:
    """Whether pickle would take `value` apart; modules are not to be, as they are no arguments but parts of a model.

    Lists and dicts of parameters are arguments too.
    """
    if isinstance(value, nn.Module):
        return type(value) in parameter_containers.WAYS
    try:
        return isinstance(value.__reduce_ex__(_PROTOCOL), tuple)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False


def _refusal(what: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} {why} was passed to or returned by a model.",
        allowed="Tensors in tuples, lists, dicts, dataclasses and other objects that pickle takes apart; no modules.",
        fix="return a tuple, a dict or a dataclass; or use the object in a forward: return -self.flow(c).log_prob(x)",
    )


def register(cls: Any) -> None:
    """Make pytrees take instances of a dataclass, or of another class, apart."""
    if cls in pytree.SUPPORTED_NODES:
        return
    if cls in parameter_containers.WAYS:  # one of PyTorch's comes back as one of ours
        for kind, ways in parameter_containers.WAYS.items():
            add_node(kind, *ways)
    elif dataclasses.is_dataclass(cls):
        _register_dataclass(cls)
    else:
        add_node(cls, _reduce, lambda parts, function: _put_together(cls, parts, function))


def _register_as_whole(cls: Any) -> None:
    """Make pytrees take instances of a class apart as a whole; so far they may have been by their parts."""
    if cls in _AS_WHOLE:
        return
    if cls in _ADDED:
        pytree._deregister_pytree_node(cls)
        _ADDED.remove(cls)
    _AS_WHOLE.add(cls)
    add_node(cls, object_graphs.take_apart, _fill)


def is_taken_apart_as_whole(cls: type) -> bool:
    """Whether objects of a class lead back to themselves, as far as is known."""
    return cls in _AS_WHOLE


def _fill(parts: Any, graph: ObjectGraph) -> Any:
    made = graph.fill(parts)
    _register_as_whole(type(made))  # another class of the same name, where a library makes its classes when asked
    return made


def _register_dataclass(cls: Any) -> None:
    names = [field.name for field in dataclasses.fields(cls)]

    def take_apart(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    def put_together(values: Any, context: Any) -> Any:
        if isinstance(context, ObjectGraph):  # taken apart in a process that has met a circle
            return _fill(values, context)
        made = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    add_node(cls, take_apart, put_together)


def _reduce(value: Any) -> tuple[list[Any], Any]:
    """Takes an object apart by `__reduce_ex__`: arguments, state, items as a list and as a dict; and the function."""
    function, arguments, *rest = value.__reduce_ex__(_PROTOCOL)
    state, items, pairs = [*rest, None, None, None][:3]
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        function, arguments = None, arguments[1:]
    return [arguments, state, None if items is None else list(items), None if pairs is None else dict(pairs)], function


def _put_together(cls: Any, parts: Any, function: Any) -> Any:
    if isinstance(function, ObjectGraph):  # taken apart in a process that has met a circle
        return _fill(parts, function)
    return _rebuild(cls, function, *parts)


def _rebuild(cls: Any, function: Any, arguments: Any, state: Any, items: Any, pairs: Any) -> Any:
    made = cls.__new__(cls, *arguments) if function is None else function(*arguments)
    if items:
        made.extend(items)
    for key, value in (pairs or {}).items():
        made[key] = value
    if state is None:
        return made
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return made
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        vars(made).update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(made, name, value)
    return made


def register_by_attributes(cls: type, *always: str) -> None:
    """Make pytrees take instances of a class apart by their attributes.

    Children are attributes that are tensors, lists of tensors, or objects of a class registered so, and those named in
    `always`; other attributes are part of the nesting.
    """
    _BY_ATTRIBUTES.add(cls)
    add_node(
        cls,
        lambda value: _take_attributes(value, always),
        functools.partial(_put_attributes, cls),
    )


_COPIED = frozenset({list, set, dict})
_BY_ATTRIBUTES: set[type] = set()
_AS_WHOLE: set[type] = set()


def _take_attributes(value: Any, always: tuple[str, ...]) -> tuple[list[Any], Any]:
    children = {name: part for name, part in vars(value).items() if name in always or _has_leaves(part)}
    rest = {name: _copied(part) for name, part in vars(value).items() if name not in children}
    return list(children.values()), (tuple(children), tuple(rest.items()))


def _has_leaves(value: Any) -> bool:
    if isinstance(value, torch.Tensor) or type(value) in _BY_ATTRIBUTES:
        return True
    is_container = type(value) in (list, tuple, dict)
    return is_container and any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _copied(value: Any) -> Any:
    """Containers anew: an object changes what it has in them, and what is known of its nesting must stay."""
    if type(value) in (list, set):
        return type(value)(map(_copied, value))
    return {key: _copied(inner) for key, inner in value.items()} if type(value) is dict else value


def _put_attributes(cls: Any, values: Any, context: Any) -> Any:
    names, rest = context
    made = cls.__new__(cls)
    vars(made).update({name: _copied(value) if type(value) in _COPIED else value for name, value in rest})
    vars(made).update(zip(names, values))
    return made


def register_containers(treespec: TreeSpec) -> None:
    """Make known the classes of a nesting that another process took apart."""
    if isinstance(treespec.context, ObjectGraph):
        _register_as_whole(treespec.type)
    elif treespec.type is not None and treespec.type not in pytree.SUPPORTED_NODES:
        register(treespec.type)
    for child in treespec.children():
        register_containers(child)


def nest_alike(first: TreeSpec, second: TreeSpec) -> bool:
    """Whether two results nest alike, but for the number of rows that an object (a `TensorDict`) says it has, and for
    which of two equal named tuples they are: a forward that defines one has another class in every call."""
    if first == second:
        return True
    is_same_kind = first.type is second.type and _alike(first.context, second.context)
    children, others = first.children(), second.children()
    return is_same_kind and len(children) == len(others) and all(map(nest_alike, children, others))


def _alike(first: Any, second: Any) -> bool:
    if type(first) is dict and type(second) is dict and first.keys() == second.keys():
        return all(_alike(value, second[key]) for key, value in first.items())
    if isinstance(first, torch.Size) and isinstance(second, torch.Size):
        return first[1:] == second[1:]
    if isinstance(first, type) and isinstance(second, type) and _names_of(first):
        return (first.__qualname__, _names_of(first)) == (second.__qualname__, _names_of(second))
    return bool(first == second)


def _names_of(cls: type) -> tuple[str, ...]:
    """Returns the fields of a class of named tuples; () of any other."""
    return tuple(getattr(cls, "_fields", ())) if issubclass(cls, tuple) else ()


def _hides_tensors(value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return False
    if isinstance(value, nn.Module) and next(itertools.chain(value.parameters(), value.buffers()), None) is not None:
        return True
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


class Nesting:
    """How the leaves of a call nest, with its constants in place.

    Attributes:
        leaves: The leaves, a `TensorSlot` for each tensor.
        treespec: How they nest.
    """

    def __init__(self, pickled_treespec: bytes, pickled_constants: bytes) -> None:
        self.leaves: list[Any] = pickle.loads(pickled_constants)
        self.treespec = unpickle_treespec(pickled_treespec)

    def fill(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with `tensors` as the tensor leaves."""
        values = iter(tensors)
        leaves = [next(values) if isinstance(leaf, TensorSlot) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.treespec)
        return args, kwargs


def pickle_treespec(treespec: TreeSpec) -> bytes:
    """`treespec` as bytes; container classes defined in ``__main__`` travel by value."""
    return pickle_for_others(treespec)


def pickle_for_others(value: Any) -> bytes:
    """Returns a value as bytes that other processes of the run can read: with classes of the script by value."""
    try:  # by name, where names are enough: a fraction of the time
        by_name = pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        by_name = None
    if by_name is None or b"__main__" in by_name:  # the `__main__` of a worker is another module
        by_value: bytes = cloudpickle.dumps(value)
        return by_value
    return by_name


@functools.lru_cache(maxsize=256)
def unpickle_treespec(data: bytes) -> TreeSpec:
    """The inverse of `pickle_treespec`; the same object for the same bytes.

    Every answer carries one, and ``catch_warnings`` makes Python forget which warnings it has shown: without the cache
    a warning that a script gives in its loop would be printed at every step.
    """
    with warnings.catch_warnings():
        # PyTorch's own pickle of a leaf asks for a class that it calls deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        treespec: TreeSpec = pickle.loads(data)
        register_containers(treespec)
    return treespec


def is_container(value: Any, kinds: tuple[type, ...]) -> bool:
    """Returns whether a value is a container of Python of some kinds; one of a library may count other things."""
    return any(isinstance(value, kind) and type(value).__len__ is kind.__len__ for kind in kinds)  # type: ignore[attr-defined]
