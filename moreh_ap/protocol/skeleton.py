"""The skeleton of a model: its module tree as it travels to the workers.

The pickle of a skeleton holds no numbers of parameters and buffers, only their names, shapes and dtypes. The controller
pickles it, a worker unpickles it with its tensors on meta.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from moreh_ap.protocol.messages.tensors import TensorData
from moreh_ap.protocol.objects.not_sent import NotSent, OtherStub
from moreh_ap.protocol.objects.reduced_objects import asking_nothing, with_attributes_first
from moreh_ap.protocol.script_code.value_forms import is_of_script


@dataclass(frozen=True)
class TensorStub:
    """A parameter or buffer inside a pickled skeleton."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool


@dataclass(frozen=True)
class AliasStub:
    """Another tensor with the memory of a parameter (``self.kept = self.weight.detach()``), and which one it is."""

    of: TensorStub
    number: int


def pickle_skeleton(module: nn.Module, memory_of: Callable[[Tensor], Any] = lambda _: None) -> bytes:
    """`module` without the values of its parameters and buffers; classes defined in ``__main__`` travel by value.

    What cannot be pickled, such as a lock or an open file, travels as `NotSent`. A module whose class pickles it as a
    file of values travels by its attributes.

    Args:
        module: The module.
        memory_of: Returns an object that tensors have in common if they share all their memory; None if none is known.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    stubs = {
        id(tensor): TensorStub(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, name in parameters)
        for name, tensor in {**buffers, **parameters}.items()
    }
    registered = set(map(id, module.modules()))
    for by_attributes in (False, True):
        buffer = io.BytesIO()
        pickler = _SkeletonPickler(buffer, stubs, registered, by_attributes=by_attributes)
        pickler.memory_of = memory_of
        tensors = [*buffers.values(), *parameters.values()]
        pickler.by_memory = {id(memory_of(one)): stubs[id(one)] for one in tensors if memory_of(one) is not None}
        pickler.dump(module)
        if pickler.met.issuperset(stubs):
            break
    return buffer.getvalue()


def pickle_attribute(value: Any, path_of: Mapping[int, str]) -> bytes:
    """An attribute of a module as it travels; what cannot be pickled in it is `NotSent`.

    Args:
        value: The attribute.
        path_of: The path of each module of the model, by `id`. Modules travel as their paths: a method of the model,
            for example, is that method of the worker's model.
    """
    buffer = io.BytesIO()
    _AttributePickler(buffer, path_of).dump(value)
    return buffer.getvalue()


def unpickle_attribute(data: bytes, model: nn.Module, device: torch.device | str = "cpu") -> Any:
    """The attribute that was pickled, with the modules of `model` in the places of those in the script.

    Args:
        data: The pickle.
        model: The worker's model.
        device: Where the worker has what the script has on the accelerator.
    """
    return _AttributeUnpickler(io.BytesIO(data), model, device).load()


def pickle_object(value: Any, path_of: Mapping[int, str], device: torch.device) -> bytes:
    """An object that a forward has set on a module, as it travels back to the script; the same bytes if it is the same.

    Args:
        value: The object.
        path_of: As for `pickle_attribute`.
        device: The device of the process that has it: the script reads of its own.
    """
    buffer = io.BytesIO()
    _ObjectPickler(buffer, path_of, device).dump(value)
    return buffer.getvalue()


def unpickle_object(data: bytes, model: nn.Module, device: torch.device) -> Any:
    """The object that was pickled, its tensors on `device`, with the modules of `model` in their places."""
    return _ObjectUnpickler(io.BytesIO(data), model, device).load()


def unpickle_skeleton(data: bytes, device: torch.device, aliases: list[tuple[str, Tensor]] | None = None) -> nn.Module:
    """The module of a pickled skeleton with its parameters and buffers on meta; tied tensors are one object.

    Args:
        data: The pickle.
        device: Where tensors are that have their values.
        aliases: Gets tensors that shall have the memory of a parameter, each with its name.
    """
    unpickler = _SkeletonUnpickler(io.BytesIO(data), device)
    module = unpickler.load()
    if aliases is not None:
        aliases += unpickler.aliases.values()
    return module


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and _is_renamed(obj):
            return _global, (obj.__module__, obj.__name__)
        if isinstance(obj, types.FunctionType) and hasattr(obj, "_torchdynamo_orig_callable"):
            return _itself, (obj._torchdynamo_orig_callable,)  # the function that `torch.compile` was given
        if isinstance(obj, _OPERATIONS):
            return _operation, (str(obj),)
        if type(obj) is weakref.ref and isinstance(obj(), (Tensor, nn.Module, type(None))):
            return _weakly, (obj(),)  # recurrent layers keep such references to their weights
        reduced = super().reducer_override(obj)
        if isinstance(obj, types.FunctionType) and isinstance(reduced, tuple):
            return _with_globals_of_library(obj, reduced)
        if reduced is not NotImplemented or isinstance(obj, (type, types.FunctionType)):
            return reduced
        if isinstance(obj, torch.jit.ScriptFunction) and hasattr(obj, "_torchdynamo_inline"):
            return _itself, (obj._torchdynamo_inline,)  # the function of Python that it was made from
        reduce = self.dispatch_table.get(type(obj))
        try:
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduce is None else reduce(obj)
            is_container = isinstance(obj, (list, dict))
            return with_attributes_first(obj, reduced) if is_container else asking_nothing(obj, reduced)
        except (TypeError, RuntimeError, pickle.PicklingError):  # objects of C++ raise a RuntimeError
            return NotSent, (f"a {type(obj).__qualname__}",)


_OPERATIONS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
"""Classes of PyTorch's operations, of which a copy is none."""


def _weakly(target: Any) -> Any:
    """Returns a weak reference to what is in the pickle too, or to something that is gone."""
    return weakref.ref(type("Gone", (), {})() if target is None else target)


def _operation(name: str) -> Any:
    """Returns the operation of a name such as ``aten.add.Tensor``."""
    return functools.reduce(getattr, name.split("."), torch.ops)


def _with_globals_of_library(function: types.FunctionType, reduced: Any) -> Any:
    """`reduced`, but a function that a library made inside another one reads the global variables of its module there.

    cloudpickle would send the values of those that it reads. A hook of transformers that collects hidden states would
    then ask for a collector that nobody sets, and a lock or a context variable would not arrive at all.
    """
    module = sys.modules.get(function.__module__ or "")
    if module is None or function.__globals__ is not vars(module) or is_of_script(module.__name__):
        return reduced
    make, (code, _, *others), (attributes, members), *rest = reduced
    members = {**members, "__globals__": {}}
    return (make, (code, _GlobalsOf(module.__name__), *others), (attributes, members), *rest)


@dataclass(frozen=True)
class _GlobalsOf:
    """Stands for the global variables of the Python module `name`, and arrives as the dict of them."""

    name: str

    def __reduce__(self) -> Any:
        return _globals_of, (self.name,)


def _globals_of(name: str) -> dict[str, Any]:
    return vars(importlib.import_module(name))


def _is_renamed(kind: type) -> bool:
    """Whether a class is where its `__name__` says and its `__qualname__` does not.

    So are enumerations of C++ that PyTorch shows under another name (`torch.nn.attention.SDPBackend`): cloudpickle
    would send them by value, which nobody can.
    """
    if kind.__qualname__ == kind.__name__ or kind.__module__ == "__main__":
        return False
    return getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


def _global(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _itself(value: Any) -> Any:
    return value


class _AttributePickler(_Pickler):
    def __init__(self, file: Any, path_of: Mapping[int, str]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._path_of = path_of

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.device.type != "cpu" and not obj.requires_grad:
            return TensorData.of(obj.detach().cpu())
        return self._path_of.get(id(obj)) if isinstance(obj, nn.Module) else None


class _AttributeUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, model: nn.Module, device: torch.device | str) -> None:
        super().__init__(file)
        self._model, self._device = model, device

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, TensorData):
            return pid.tensor().to(self._device if pid.on_device else "cpu")
        return self._model.get_submodule(pid)


@dataclass(frozen=True)
class _DeviceOfObject:
    """Stands for the device that a model is on."""


class _ObjectPickler(_AttributePickler):
    def __init__(self, file: Any, path_of: Mapping[int, str], device: torch.device) -> None:
        super().__init__(file, path_of)
        self._device = device

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.device) and obj.type == self._device.type:
            return _DeviceOfObject()
        if isinstance(obj, Tensor):
            return TensorData.of(obj.detach().cpu(), on_device=obj.device.type == self._device.type)
        return super().persistent_id(obj)

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and reduced[0] is NotSent:
            raise pickle.PicklingError(f"{reduced[1][0]} cannot be pickled")
        return reduced


class _ObjectUnpickler(_AttributeUnpickler):
    def persistent_load(self, pid: Any) -> Any:
        return self._device if isinstance(pid, _DeviceOfObject) else super().persistent_load(pid)


class _SkeletonPickler(_Pickler):
    def __init__(self, file: Any, stubs: dict[int, TensorStub], registered: set[int], *, by_attributes: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._stubs, self._registered, self._by_attributes = stubs, registered, by_attributes
        self.met: set[int] = set()
        self.memory_of: Callable[[Tensor], Any] = lambda _: None
        self.by_memory: dict[int, TensorStub] = {}
        self._others: dict[int, OtherStub] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        stub = self._stubs.get(id(obj))
        if stub is not None:
            self.met.add(id(obj))
            return stub
        if id(obj) in self._others:
            return self._others[id(obj)]
        of = None if obj.requires_grad else self.by_memory.get(id(self.memory_of(obj)))
        if of is not None and of.shape == tuple(obj.shape):
            return AliasStub(of, id(obj))
        # A tensor that is an ordinary attribute of a module travels with its value.
        return TensorData.of(obj.detach().cpu(), on_device=obj.device.type != "cpu")

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module):
            if id(obj) not in self._registered:
                self._note_parameters_of_others(obj)
            if parametrize.is_parametrized(obj):
                return _reduce_parametrized(obj)
            if self._by_attributes and type(obj).__reduce__ is not object.__reduce__:
                return object.__new__, (type(obj),), vars(obj).copy()
            return _without_new(super().reducer_override(obj))
        return super().reducer_override(obj)

    def _note_parameters_of_others(self, module: nn.Module) -> None:
        """A module in a list of Python: workers would have copies of its parameters that are never trained."""
        for param in module.parameters():
            if param.requires_grad and param.is_cuda and id(param) not in self._stubs:
                stub = OtherStub(type(module).__qualname__, tuple(param.shape), param.dtype)
                self._others.setdefault(id(param), stub)


def _without_new(reduced: Any) -> Any:
    """`reduced`, but a class whose `__new__` wants what `__init__` is given is not asked to make the module."""
    if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__ and len(reduced[1]) == 1:  # type: ignore[attr-defined]
        return (object.__new__, *reduced[1:])
    return reduced


def _reduce_parametrized(module: nn.Module) -> Any:
    """Pickles a module with parametrizations, which PyTorch refuses because it gives each a class of its own."""
    base = parametrize.type_before_parametrizations(module)
    names = tuple(module.parametrizations)  # type: ignore[arg-type]
    return _make_parametrized, (base, names), vars(module).copy()


def _make_parametrized(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Returns a bare module of class `base` whose tensors `names` are properties; its state is still to come."""
    module = base.__new__(base)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


class _SkeletonUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, device: torch.device) -> None:
        super().__init__(file)
        self._device = device
        self._made: dict[str, Tensor] = {}
        self.aliases: dict[int, tuple[str, Tensor]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What a module defines; a stand-in that refuses to be used if it does not define that in a worker.

        A module may define more where `torch.cuda.is_available()`, which holds in the script and not in a CPU worker.
        """
        try:
            return super().find_class(module, name)
        except AttributeError:
            return NotSent(f"{name} of {module}", "that module does not define it in a worker")

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, TensorData):
            return pid.tensor().to(self._device if pid.on_device else "cpu")
        if isinstance(pid, OtherStub):
            return pid.parameter()
        if isinstance(pid, AliasStub):
            alias = torch.empty(pid.of.shape, dtype=pid.of.dtype, device="meta")
            return self.aliases.setdefault(pid.number, (pid.of.name, alias))[1]
        if pid.name not in self._made:
            tensor = torch.empty(pid.shape, dtype=pid.dtype, device="meta")
            self._made[pid.name] = nn.Parameter(tensor, pid.requires_grad) if pid.is_parameter else tensor
        return self._made[pid.name]
