"""Parameters that a forward itself changes: in place, or by putting another one in their place.

Decides how such a change is noticed, undone, and kept in the parameter that workers know. Must not know why a forward
runs, or what its rows are.

[Note: state]
A parameter that a forward changes is state of the model, as a buffer is: a codebook that follows averages, an encoder
that follows another, the moving averages of Keras' normalisation. Where rows are shared, a worker could change its copy
by what it sees of its rows. So what becomes of it is compared, as what becomes of buffers is, and a forward under which
copies would differ runs whole.

[Note: in another's place]
After ``self.weight = nn.Parameter(value)`` one process has a parameter of which no optimizer knows. Workers keep theirs
(names, gradients and optimizers find it) and give it the value. That is the same as long as it gets no
gradient from there on: then an error says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.data.fsdp import has_others_in_place
from moreh_ap.parallelizer.data.outer_layers import unnoticed
from moreh_ap.parallelizer.observation.call_sites import GATHERING, is_called_by
from moreh_ap.plan import Plan

_IS_REPLACED = "_moreh_is_replaced"
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class WrittenParameters(TorchDispatchMode):
    """Inside, the parameters of a module that operations write are noted; afterwards they are what they were.

    Attributes:
        names: The parameters that were written.
        state: What became of those among them of which this worker has all entries.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._has_others = has_others_in_place(module)
        self._memory: dict[int, str] = {}
        self._before: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self._values: dict[str, Tensor] = {}
        self.names: list[str] = []
        self.state: dict[str, Tensor] = {}
        self._setting = _SettingData(self._note_set) if self._has_others else nullcontext()

    def __enter__(self) -> WrittenParameters:
        self._setting.__enter__()
        self._before = {name: (parameter, parameter.detach()) for name, parameter in self._plain().items()}
        self._memory = {_address(tensor): name for name, (_, tensor) in self._before.items()}
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._setting.__exit__(*raised)
        for name, (parameter, before) in self._before.items():
            if parameter.data_ptr() != before.data_ptr():  # ``parameter.data = other``
                if name not in self._values:
                    self.names.append(name)
                self.state[name] = parameter.detach()
                parameter.data = before
        for name, value in self._values.items():
            # What stood in its place during the forward is not kept, nor what FSDP2 had gathered before and has freed.
            if name in self._before and self._before[name][1].untyped_storage().nbytes():
                _, before = self._before[name]
                self.state.setdefault(name, before.clone())
                before.data.copy_(value)  # `.data`: a graph that has kept the parameter is not told of the change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            if self._has_others:
                self._memory = {_address(parameter): name for name, parameter in self._plain().items()}
            for tensor in _written(func, args, kwargs):
                name = self._memory.get(_address(tensor))
                if name is not None and name not in self._values:
                    self.names.append(name)
                    full = self._before[name][1] if name in self._before else tensor
                    self._values[name] = full.detach().clone()
        return func(*args, **kwargs)

    def _note_set(self, tensor: Tensor) -> None:
        """Notes ``parameter.data = other`` of a tensor in another's place, which is not there afterwards."""
        name = next((name for name, parameter in self._plain().items() if parameter is tensor), None)
        if name is not None and name not in self._before and name not in self.names:
            self.names.append(name)

    def _plain(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that have memory of their own; in a forward also the tensors that replace others."""
        with unnoticed():
            return {
                name: parameter
                for name, parameter in self._module.named_parameters()
                if type(parameter) in (nn.Parameter, Tensor) and not parameter.is_meta and parameter.numel()
            }


class _SettingData(TorchFunctionMode):
    """Inside, tensors to which the forward gives the memory of others are told to `note`.

    A module's `to` gives each parameter what it becomes, which is its own memory where nothing changes.
    """

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and not is_called_by(GATHERING) and not _is_same(*args):
            self._note(args[0])
        return func(*args, **(kwargs or {}))


def _is_same(tensor: Tensor, other: Any) -> bool:
    """Returns whether two tensors are the same entries of the same memory."""
    layouts = [(one.data_ptr(), one.shape, one.stride(), one.dtype) for one in (tensor, other)]
    return layouts[0] == layouts[1]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (
                leaf for leaf in tree_leaves(given) if type(leaf) in (Tensor, nn.Parameter) and not leaf.is_meta
            )


def keep_parameters(module: nn.Module) -> RemovableHandle:
    """Has a parameter that is put in another's place give it its value. See [Note: in another's place].

    It lasts as long as the module; the handle ends it earlier.
    """
    model = weakref.ref(module)

    def keep(owner: nn.Module, name: str, new: nn.Parameter | None) -> nn.Parameter | None:
        old = owner._parameters.get(name)
        root = model() if old is not None and new is not None and new is not old else None
        if root is None or not any(submodule is owner for submodule in root.modules()):
            return None
        assert old is not None and new is not None
        if isinstance(old, DTensor) or isinstance(new, DTensor):
            return None  # FSDP2 gathers a parameter of an `nn.LSTM`, or lets go of it
        if has_others_in_place(root) or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise UnsupportedError(
                f"forward puts a parameter of shape {tuple(new.shape)} in place of {name} of shape {tuple(old.shape)}, "
                "which is sharded or another one.",
                allowed="A parameter of the same shape and dtype, under plans with replicate alone in float32.",
                fix=f"with torch.no_grad(): self.{name}.copy_(value)",
            )
        with torch.no_grad():
            old.copy_(new)
        if not hasattr(old, _IS_REPLACED) and old.requires_grad:
            setattr(old, _IS_REPLACED, True)
            old.register_hook(lambda gradient: _refuse_gradient(name))
        return old

    handle = register_module_parameter_registration_hook(keep)  # type: ignore[arg-type]  # it may return a parameter
    weakref.finalize(module, handle.remove)
    return handle


def _refuse_gradient(name: str) -> None:
    raise UnsupportedError(
        f"forward puts another parameter in place of {name}, and that gets a gradient, of which no optimizer knows.",
        allowed="Parameters that forward replaces and that no loss depends on; or a change in place.",
        fix=f"with torch.no_grad(): self.{name}.copy_(value)",
    )


def require_full_parameters(module: nn.Module, plan: Plan, name: str) -> None:
    """Refuses a forward that changes a parameter, where a worker has a part of it, or a forward runs twice.

    Raises:
        UnsupportedError: The plan does one of these.
    """
    if has_others_in_place(module) or plan.tensor > 1 or plan.pipeline > 1 or plan.recompute != "none":
        raise UnsupportedError(
            f"forward changes the parameter {name} itself, which plan={str(plan)!r} splits or computes twice.",
            allowed="Plans with replicate alone, in float32, for such a model.",
            fix=f'...(plan="replicate={plan.num_devices}", mixed_precision=False)',
        )
