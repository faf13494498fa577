"""Tensors on the accelerator whose memory is an ordinary one of this process: PyTorch computes on them as on the CPU.

Decides how such a tensor looks to the script, and what a function of PyTorch does with some. Must not know which models
run in this process: `session/own_process` does, and says whether new tensors are of this class (`HOST.holds_all`).

[Note: host tensors]
An operation on other virtual tensors takes its way through Python below autograd, some ten microseconds each. A host
tensor is an ordinary tensor but for its Python class, which says that it is on the accelerator: autograd and the
operations are PyTorch's own, and what is left is the function mode, which gives results the class. A step of an
optimizer takes the class off all of its tensors and gives it back at the end, so that nothing of it is looked at. What
is asked of a tensor without a tensor for an answer, such as its shape, does not pass the mode. A host tensor becomes a
handle on another value, or the reverse, in place: the script keeps its object.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.device import tensor as virtual_tensors
from moreh_ap.device.patches import parameter_hooks
from moreh_ap.device.tensor import ACCELERATOR, OWN_ATTRIBUTES, VirtualTensor, place
from moreh_ap.device.values import Cell, Here

_OWN = OWN_ATTRIBUTES - {"_is_param"}
"""Attributes that a host tensor does not keep."""

_grad_of = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_set_grad_of = torch.Tensor.grad.__set__  # type: ignore[union-attr]


class _Host:
    """Whether new tensors on the accelerator are host tensors, which this process computes itself.

    Attributes:
        holds_all: Whether no model is on the workers, and one is here: new tensors on the accelerator are host tensors.
        prepare: Called before there is a host tensor.
    """

    holds_all = False
    prepare: Callable[[], object] | None = None

    def begin(self) -> None:
        """Has everything prepared for host tensors."""
        prepare, self.prepare = self.prepare, None
        if prepare is not None:
            prepare()

    def end(self) -> None:
        """Has no tensor become a host tensor by itself."""
        self.holds_all, self.prepare = False, None


HOST = _Host()


class HostTensor(VirtualTensor):
    """A tensor on the accelerator that PyTorch itself takes for one on the CPU."""

    __torch_dispatch__ = torch._C._disabled_torch_dispatch_impl  # type: ignore[assignment]
    #: What a function of PyTorch does with such tensors: called with (func, types, args, kwargs).
    function: ClassVar[Callable[[Any, Any, Any, Any], Any]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.function(func, types, args, kwargs or {})

    device = ACCELERATOR  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    @property
    def _cell(self) -> Cell:  # type: ignore[override]
        """Returns a cell with its value, for code that knows virtual tensors only. The value cannot be replaced."""
        cell = Cell(Here(as_ordinary(self)), ACCELERATOR)
        cell.has_views = True
        return cell

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        with torch._C.DisableTorchFunction():
            return torch.Tensor.layout.__get__(self)  # type: ignore[attr-defined, no-any-return]

    def get_device(self) -> int:
        return 0

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        with torch._C.DisableTorchFunction():
            return mark(torch.Tensor.data.__get__(self))  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, new: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            value = new.host_value() if isinstance(new, VirtualTensor) else new.detach().clone()
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        with torch._C.DisableTorchFunction():
            gradient = _grad_of(self)
            if type(gradient) is Tensor:
                gradient.__class__ = HostTensor
            return gradient  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, new: Tensor | None) -> None:
        with torch._C.DisableTorchFunction():
            _set_grad_of(self, new if new is None or type(new) is HostTensor else mark(as_ordinary(new)))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def host_value(self) -> Tensor:
        """Returns the value as a CPU tensor that shares its memory."""
        return as_ordinary(self)

    def item(self) -> Any:
        with torch._C.DisableTorchFunction():
            return torch.Tensor.item(self)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        if "_is_param" in self.__dict__:
            return parameter_hooks.add(self, hook)
        return torch.Tensor.register_hook(self, lambda gradient: hook(mark(gradient)))  # type: ignore[no-untyped-call]

    def retain_grad(self) -> None:
        """Has backward set `grad` although this tensor is not a leaf."""
        with torch._C.DisableTorchFunction():
            torch.Tensor.retain_grad(self)


def _past_the_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of PyTorch's tensors, none of whose results are tensors, that no function mode sees."""

    @functools.wraps(method)
    def answer(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return answer


for _name in ("dim", "size", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "__bool__"):
    setattr(HostTensor, _name, _past_the_mode(getattr(torch.Tensor, _name)))
for _name in ("shape", "dtype", "ndim", "grad_fn", "is_leaf"):
    setattr(HostTensor, _name, property(_past_the_mode(getattr(torch.Tensor, _name).__get__)))


def as_ordinary(tensor: Tensor) -> Tensor:
    """Returns an ordinary tensor without a graph that shares memory with a tensor whose value is in this process."""
    with torch._C.DisableTorchFunction():
        value = tensor if type(tensor) is HostTensor or not isinstance(tensor, VirtualTensor) else tensor.host_value()
        return value.detach()


def mark(result: Any) -> Any:
    """Gives the ordinary tensors of a result the class, in place, and returns it."""
    kind = type(result)
    if kind is Tensor:
        result.__class__ = HostTensor
    elif issubclass(kind, (tuple, list)) and kind is not torch.Size:
        for one in result:
            mark(one)
    return result


def mark_all(tree: Any) -> Any:
    """Gives the ordinary tensors anywhere in a result the class, in place, and returns it."""
    for leaf in tree_leaves(tree):
        if type(leaf) is Tensor:
            leaf.__class__ = HostTensor
    return tree


def has_host_tensor(tree: Any) -> bool:
    """Returns whether a leaf of `tree` is a host tensor."""
    return any(type(leaf) is HostTensor for leaf in tree_leaves(tree))


CLASSES = threading.RLock()
"""Held while host tensors are without their class, which a tensor has for all threads, and where one looks for it."""


class without_class:
    """Has host tensors be ordinary tensors, or parameters, until the block ends. Other threads wait."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [*tensors]

    def __enter__(self) -> None:
        CLASSES.acquire()
        for one in self._tensors:
            one.__class__ = nn.Parameter if "_is_param" in one.__dict__ else Tensor

    def __exit__(self, *_: object) -> None:
        for one in self._tensors:
            one.__class__ = HostTensor
        CLASSES.release()


# -- other tensors that become host tensors, and the reverse -------------------------------------------------------


def put(tensor: Tensor) -> VirtualTensor:
    """Returns an accelerator tensor that has the memory of `tensor`; the caller must not keep `tensor`."""
    return mark(tensor.detach()) if HOST.holds_all else place(tensor)  # type: ignore[no-any-return]


def to_accelerator(tensor: Tensor) -> Tensor:
    """Returns a copy of a CPU tensor on the accelerator, differentiable like `Tensor.cuda`."""
    if not HOST.holds_all:
        return virtual_tensors.to_accelerator(tensor)
    with torch._C.DisableTorchFunction():
        return mark(tensor.clone())  # type: ignore[no-any-return]


def to_host(tensor: VirtualTensor) -> Tensor:
    """Returns a copy of an accelerator tensor as an ordinary CPU tensor, differentiable like `Tensor.cpu`; may wait."""
    if type(tensor) is not HostTensor:
        return virtual_tensors.to_host(tensor)
    with torch._C.DisableTorchFunction():
        return tensor.clone()


def may_be_held(tensor: VirtualTensor) -> bool:
    """Returns whether the value of a virtual tensor is an ordinary one in this process."""
    if type(tensor) is not VirtualTensor or tensor._compressed is not None:
        return type(tensor) is HostTensor
    value = tensor._cell.value
    is_here = tensor._cell.device is ACCELERATOR and type(value) is Here and type(value.tensor) is Tensor
    return is_here and value.tensor.layout is torch.strided  # type: ignore[attr-defined]


def hold(tensor: VirtualTensor) -> None:
    """Makes a host tensor of a virtual tensor without a graph, in place; its value is read."""
    if type(tensor) is HostTensor:
        return
    HOST.begin()
    with torch.inference_mode(False), torch._C.DisableTorchFunction():  # what trains later would not be able to
        gradient = tensor.grad
        alias = tensor.detach() if tensor._cell.has_others(tensor._user) else None
        _become(tensor, HostTensor, tensor._cell.read_here().tensor.detach())
        tensor.grad = gradient
        if alias is not None:  # others share the memory, and follow the tensor when its value leaves this process
            tensor.__dict__["_alias"] = alias


def let_go(tensor: Tensor) -> None:
    """Makes a virtual tensor of a host tensor without a graph, in place, so that its value can be elsewhere."""
    if type(tensor) is not HostTensor:
        return
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        gradient = tensor.grad
        alias = _alias_of(tensor)
        _become(tensor, VirtualTensor, place(as_ordinary(tensor)) if alias is None else alias)
        tensor.grad = None if gradient is None else place(as_ordinary(gradient))


def _alias_of(tensor: Tensor) -> VirtualTensor | None:
    """Returns a virtual tensor with the cell that a host tensor had before, if it is still the memory of others."""
    alias: VirtualTensor | None = vars(tensor).get("_alias")
    value = None if alias is None else alias._cell.value
    is_same = isinstance(value, Here) and value.tensor.data_ptr() == as_ordinary(tensor).data_ptr()
    return alias if is_same else None


def _become(tensor: Tensor, kind: type[Tensor], other: Tensor) -> None:
    """Gives a tensor's object the class `kind` and the memory of `other`; its graph so far ends in `other`."""
    if tensor.requires_grad:
        _hand_gradients_on(tensor, other._version)
        other.requires_grad_()
    own = {name: value for name, value in vars(tensor).items() if name not in _OWN}
    before, ours = type(tensor), {name: value for name, value in vars(tensor).items() if name in _OWN}
    torch._C._swap_tensor_impl(tensor, other)  # type: ignore[attr-defined]
    tensor.__class__, tensor.__dict__ = kind, {**own, **vars(other)}
    other.__class__, other.__dict__ = before, ours


def _hand_gradients_on(tensor: Tensor, version: int) -> None:
    """Has a backward through what was computed from a leaf until now still add to the gradient of its object.

    The earlier graph does not know of later changes in place; `version` is that of the memory that the object gets.
    """
    reference = weakref.ref(tensor)

    def add(gradients: tuple[Tensor, ...]) -> None:
        target, gradient = reference(), gradients[0]
        if target is None or gradient is None:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if target._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{type(target).__name__} of shape {[*target.shape]} was changed after the forward."
                )
            gradient = mark(as_ordinary(gradient)) if type(target) is HostTensor else on_accelerator(gradient)
            target.grad = gradient.clone() if target.grad is None else target.grad + gradient

    torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(add)


def as_host(tensor: VirtualTensor) -> Tensor:
    """Returns a host tensor for the value of a virtual tensor, the same object where it has no graph; may wait."""
    if type(tensor) is HostTensor:
        return tensor
    with torch._C.DisableTorchFunction():
        if tensor.grad_fn is None and may_be_held(tensor):
            hold(tensor)
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            return _AsHost.apply(tensor)  # type: ignore[no-any-return]
        return mark(as_ordinary(tensor))  # type: ignore[no-any-return]


def on_accelerator(tensor: Tensor) -> VirtualTensor:
    """Returns a virtual tensor that shares memory with a host tensor, and is part of its graph."""
    with torch._C.DisableTorchFunction():
        if isinstance(tensor, VirtualTensor) and type(tensor) is not HostTensor:
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            return _OnAccelerator.apply(tensor)  # type: ignore[no-any-return]
        return place(as_ordinary(tensor))


class _AsHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: VirtualTensor) -> Tensor:
        return mark(as_ordinary(tensor))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return on_accelerator(gradient)


class _OnAccelerator(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return place(as_ordinary(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return as_host(gradient) if isinstance(gradient, VirtualTensor) else gradient
