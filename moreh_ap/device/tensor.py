"""The virtual tensor: a tensor of a script on the accelerator.

A `VirtualTensor` has a shape, a dtype and a `Cell`; its Python-level device is ``cuda:0`` while its C++ device is
``cpu`` (a wrapper whose C++ device is cuda aborts the process on builds of PyTorch without CUDA). Autograd works on it
as on any tensor; operations below autograd are in `operations`.

This module must not know about workers, models or messages: values on the workers are reached through `Value.owner`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from moreh_ap.device.patches import parameter_hooks
from moreh_ap.device.storage import AddressOnly, mark
from moreh_ap.device.values import Cell, CellUser, Here
from moreh_ap.errors import UnsupportedError

ACCELERATOR = torch.device("cuda", 0)
CPU = torch.device("cpu")
_make_wrapper_subclass = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]  # `wrapped_tensors` replaces it
_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class VirtualTensor(torch.Tensor):
    """A tensor on the accelerator, made by `to_accelerator` or promised by a session."""

    _cell: Cell
    _user: CellUser
    _compressed: torch.layout | None = None
    #: What a function of PyTorch, and below autograd an ATen operation, does with such tensors: called with (func,
    #: args, kwargs). `function_mode` and `operations` set them when they are imported; this module imports neither.
    torch_function: ClassVar[Callable[[Any, Any, Any], Any]]
    torch_dispatch: ClassVar[Callable[[Any, Any, Any], Any]]

    @staticmethod
    def __new__(cls, cell: Cell, like: Tensor, requires_grad: bool = False) -> VirtualTensor:
        """Makes a handle on `cell` with the shape, strides and dtype of `like`, which may be a meta tensor."""
        layout = like.layout
        is_compressed = layout is not torch.strided and layout in _COMPRESSED  # PyTorch has no wrapper for these
        handle = _make_wrapper_subclass(
            cls,
            like.size(),
            strides=None if is_compressed else like.stride(),
            storage_offset=None if is_compressed else like.storage_offset(),
            dtype=like.dtype,
            layout=torch.sparse_coo if is_compressed else layout,
            device=CPU,
            requires_grad=requires_grad,
        )
        handle._use(cell)
        if is_compressed:
            handle._compressed = layout
        return handle  # type: ignore[no-any-return]

    def _use(self, cell: Cell) -> None:
        self._cell, self._user = cell, cell.new_user()

    # -- methods for Python code --------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._cell.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self._cell.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self._cell.device.type == "cpu"

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return self._compressed or torch.Tensor.layout.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return self.layout is torch.sparse_coo

    @property
    def is_sparse_csr(self) -> bool:  # type: ignore[override]
        return self.layout is torch.sparse_csr

    def get_device(self) -> int:
        return self._cell.device.index if self.is_cuda else -1

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        # Not `detach()`, which shares its version counter: autograd must not see changes through `data`.
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, new: Tensor) -> None:
        owner, fits = self._cell.value.owner, new.shape == self.shape and new.dtype == self.dtype
        if isinstance(new, VirtualTensor) and new._cell is self._cell and fits and new.stride() == self.stride():
            return  # they share their memory already
        is_kept = owner is not None and owner.is_own(self._cell.value, self)
        if is_kept and not fits:
            owner.no_longer_keeps(self._cell.value)
        if owner is not None and not (is_kept and fits):
            new = new if isinstance(new, VirtualTensor) else to_accelerator(new)
        if isinstance(new, VirtualTensor) and not (is_kept and fits):
            torch.Tensor.data.__set__(self, new.detach())  # type: ignore[attr-defined]
            self._use(new._cell)
        else:
            self._leave_aliases()
            with torch.no_grad():
                self.detach().copy_(new)

    def _leave_aliases(self) -> None:
        """Separates other tensors from this tensor's memory: they keep the present value, and it may be replaced."""
        shared = self._cell
        if not shared.has_others(self._user):
            return
        with torch.no_grad():
            kept = self.detach().clone()
        self._use(Cell(shared.value, shared.device))
        shared.value = kept._cell.value  # type: ignore[attr-defined]

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        owner = self._cell.value.owner
        if owner is not None and owner.keeps_gradient(self._cell.value):
            return owner.gradient_of(self._cell.value)
        with torch._C.DisableTorchFunction():
            return torch.Tensor.grad.__get__(self)  # type: ignore[union-attr]

    @grad.setter
    def grad(self, new: Tensor | None) -> None:
        owner = self._cell.value.owner
        if owner is not None and owner.keeps_gradient(self._cell.value):
            owner.set_gradient(self._cell.value, new)
        else:
            with torch._C.DisableTorchFunction():
                torch.Tensor.grad.__set__(self, new)  # type: ignore[union-attr]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def hand_gradient_on(self) -> Tensor | None:
        """Removes and returns the gradient that the controller's autograd has accumulated, if any."""
        gradient: Tensor | None = torch.Tensor.grad.__get__(self)  # type: ignore[union-attr]
        if gradient is not None:
            torch.Tensor.grad.__set__(self, None)  # type: ignore[union-attr]
        return gradient

    def expect_gradients_here(self) -> None:
        """From now on, gradients of this parameter from the controller's autograd go to the owner of its value.

        They come from the script's computations with a parameter outside of a module: a penalty on weights, logits
        from an embedding's matrix.
        """
        if self.__dict__.get("_hands_gradients_on") or not (self.is_floating_point() or self.is_complex()):
            return
        self._hands_gradients_on = True
        with torch._C.DisableTorchFunctionSubclass():
            trainable = self.requires_grad
            self.requires_grad_(True)  # PyTorch accepts a hook only then
            super().register_post_accumulate_grad_hook(_hand_gradient_on)  # type: ignore[no-untyped-call]
            self.requires_grad_(trainable)

    def host_value(self) -> Tensor:
        """Returns the value as a CPU tensor that the caller must not change; may wait.

        A promise is kept in the controller once read; state tensors (and tensors in files) stay where they are.
        """
        value = self._cell.value
        return value.read() if value.stays else self._cell.read_here().tensor

    def new(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Returns a tensor of the same dtype on the same device, with a size or with data: ``x.new(3, 4)``."""
        plain = [arg.to_host() if isinstance(arg, VirtualTensor) else arg for arg in args]
        made: Tensor = torch.empty(0, dtype=self.dtype, device="cpu").new(*plain)  # type: ignore[no-untyped-call]
        return place(made) if self.is_cuda else made

    def register_hook(self, hook: Any) -> Any:
        if getattr(self, "_is_param", False):
            return parameter_hooks.add(self, hook)
        return self._watch_gradient(_observing(hook)) or super().register_hook(hook)  # type: ignore[no-untyped-call]

    def retain_grad(self) -> None:
        """Has backward set `grad` although this tensor is not a leaf."""
        reference = weakref.ref(self)

        def keep(gradient: Tensor) -> None:
            tensor = reference()
            if tensor is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # PyTorch warns if a non-leaf tensor has no gradient
                    before = torch.Tensor.grad.__get__(tensor)  # type: ignore[union-attr]
                torch.Tensor.grad.__set__(tensor, gradient if before is None else before + gradient)  # type: ignore[union-attr]

        if self._watch_gradient(keep, adds_up=True) is None:
            super().retain_grad()  # type: ignore[no-untyped-call]

    def _watch_gradient(self, watcher: Callable[[Tensor], None], adds_up: bool = False) -> Any:
        """Has the remote call that gave this tensor report its gradient; None if the controller's autograd knows it."""
        watch = getattr(self.grad_fn, "watch_output", None)
        return None if watch is None else watch(self.output_nr, watcher, adds_up)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        if getattr(self, "_is_param", False):
            return parameter_hooks.add(self, hook, on_sum=True)
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def to_host(self) -> Tensor:
        """Returns the value as an ordinary CPU tensor, detached and with memory of its own; may wait."""
        is_copy = self._cell.value.reads_copies
        with torch._C.DisableTorchFunction():
            value = self.host_value().detach()
            return value if is_copy else value.clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(self.to_host())
        extras = [f"device='{self.device}'"] if self.is_cuda else []
        grad_fn = self.grad_fn
        if grad_fn is not None:
            extras.append(f"grad_fn=<{type(grad_fn).__name__}>")
        elif self.requires_grad:
            extras.append("requires_grad=True")
        text = ", ".join([text[:-1], *extras]) + ")"
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def item(self) -> Any:
        """Returns the value of a tensor with one element as a Python number; may wait."""
        with torch._C.DisableTorchFunction():
            return self.host_value().item()

    def tolist(self) -> Any:
        return self.to_host().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force and self.is_cuda:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self.to_host().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles (and so `torch.save`s) as an ordinary CPU tensor: the file loads without this package."""
        plain = self.as_plain()
        if self.is_cuda and plain.layout == torch.strided:
            mark(plain.untyped_storage())
        return plain.__reduce_ex__(protocol)

    def as_plain(self) -> Tensor:
        """Returns an ordinary CPU tensor (or `nn.Parameter`) with the value and `requires_grad` of this tensor."""
        host = self.to_host()
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(host, requires_grad=self.requires_grad)
        return host.requires_grad_(self.requires_grad) if host.is_floating_point() else host

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copy = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]

    # `nn.Module._apply` swaps a parameter for a traceable wrapper in place, so that optimizers keep their parameters.

    def __tensor_flatten__(self) -> Any:
        """Returns the inner tensors: none, only the storage handle, which libraries that write files use."""
        return ["memory"], None

    @property
    def memory(self) -> AddressOnly:
        """Returns the handle on its memory: an identity and a size, without data."""
        return AddressOnly.of(self._cell, self)

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        raise TypeError("a virtual tensor has no tensors inside: it cannot be traced by torch.compile")

    # -- methods for PyTorch --------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, torch.Tensor) for kind in types):
            return NotImplemented  # an argument of another tensor-like class: that class's handler comes next
        with torch._C.DisableTorchFunctionSubclass():
            return cls.torch_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if len(types) > 1 and not all(issubclass(kind, VirtualTensor) for kind in types):
            return NotImplemented  # a library's class with tensors inside: its own rule comes next
        with torch._C.DisableTorchFunction():  # in a backward the mode that redirects "cuda" would see each attribute
            return cls.torch_dispatch(func, args, kwargs or {})


OWN_ATTRIBUTES = frozenset({"_cell", "_user", "_compressed", "_is_param", "_hands_gradients_on", "_alias"})
"""Attributes of a tensor on the accelerator that are not the script's."""

ORDINARY = frozenset({Tensor, torch.nn.Parameter, VirtualTensor})
"""Classes of tensors that are none of a library's."""


def _hand_gradient_on(parameter: VirtualTensor) -> None:
    value = parameter._cell.value
    if value.owner is not None and value.owner.keeps_gradient(value):
        gradient = parameter.hand_gradient_on()
        if gradient is not None:
            value.owner.add_gradient(value, gradient)


def _observing(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    def watcher(gradient: Tensor) -> None:
        if hook(gradient) is not None:
            raise UnsupportedError(
                "A hook on an output of a model that has others, or hooks of its own, returned another gradient; the "
                "workers have used theirs.",
                allowed="Hooks that look at the gradient; any hook if the model returns one tensor and has no hooks.",
                fix="output.register_hook(lambda gradient: kept.append(gradient))",
            )

    return watcher


def on_host(tensor: Tensor) -> Tensor:
    """Returns the value of any tensor as a CPU tensor that the caller must not change; may wait."""
    return tensor.host_value() if isinstance(tensor, VirtualTensor) else tensor


def to_accelerator(tensor: Tensor) -> VirtualTensor:
    """Returns a copy of a CPU tensor on the accelerator, differentiable like `Tensor.cuda`."""
    return _ToAccelerator.apply(tensor) if tensor.requires_grad else place(tensor.detach().clone())


def place(tensor: Tensor) -> VirtualTensor:
    """Returns an accelerator tensor that wraps `tensor` without a copy; the caller must not keep `tensor`.

    Raises:
        UnsupportedError: It is a nested tensor, whose sizes are no numbers.
    """
    if tensor.is_nested:
        raise nested_refused()
    with torch._C.DisableTorchFunction():
        return VirtualTensor(Cell(Here(tensor), ACCELERATOR), tensor)


def nested_refused() -> UnsupportedError:
    """Returns the error for a nested tensor that would come to be on the accelerator."""
    return UnsupportedError(
        "A nested tensor (`torch.nested`) would come to be on the accelerator.",
        allowed="Padded tensors with a mask, lists of tensors, packed sequences; jagged ones that are made there.",
        fix='torch.nested.nested_tensor([x.to("cuda") for x in tensors], layout=torch.jagged)',
    )


def to_host(tensor: VirtualTensor) -> Tensor:
    """Returns an ordinary CPU tensor with the value of `tensor`, differentiable like `Tensor.cpu`; may wait."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _ToHost.apply(tensor)
    return tensor.to_host()


class _ToAccelerator(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return place(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.to_host() if isinstance(grad, VirtualTensor) else grad


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: VirtualTensor) -> Tensor:
        return tensor.to_host()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return place(grad.detach().clone())


def has_accelerator_tensor(tree: Any) -> bool:
    """Returns whether a leaf of `tree` is a tensor on the accelerator."""
    return any(isinstance(leaf, VirtualTensor) and leaf.is_cuda for leaf in tree_flatten(tree)[0])
