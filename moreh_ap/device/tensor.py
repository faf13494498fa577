"""The virtual tensor: what a script sees of the accelerator.

A `VirtualTensor` has a shape, a dtype and a `Cell`; its Python-level device is ``cuda:0`` while its C++ device is
``cpu`` (a wrapper whose C++ device is cuda aborts the process on builds of PyTorch without CUDA). Autograd works on it
as on any tensor. Below autograd, `__torch_dispatch__` follows the *rule of completeness*: an operation that nobody made
fast reads what it needs, computes on the controller's CPU and writes back what it changed.

This module must not know about workers, models or messages: values that live on workers answer through `Value.owner`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from moreh_ap.device.values import MAX_DEFERRED_ELEMENTS, Cell, Here, InFile, Later, Value, View
from moreh_ap.errors import UnsupportedError

ACCELERATOR = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten

_ALIASES = {aten.detach.default, aten.alias.default}
# Their result depends on the shape and dtype of the first argument alone: `loss.backward()` calls ones_like(loss).
_NEEDS_ONLY_METADATA = {
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# PyTorch accepts a CPU tensor beside a CUDA tensor in these operations.
_TAKES_BOTH_DEVICES = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


class VirtualTensor(torch.Tensor):
    """A tensor on the accelerator. Create one with `to_accelerator` or let a session promise one."""

    _cell: Cell

    @staticmethod
    def __new__(cls, cell: Cell, like: Tensor, requires_grad: bool = False) -> VirtualTensor:
        """A handle on `cell` with the shape, strides and dtype of `like` (a meta tensor will do)."""
        handle = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            layout=like.layout,
            device=CPU,
            requires_grad=requires_grad,
        )
        handle._cell = cell
        return handle  # type: ignore[no-any-return]

    # -- what Python code asks a tensor --------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._cell.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self._cell.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self._cell.device.type == "cpu"

    def get_device(self) -> int:
        return self._cell.device.index if self.is_cuda else -1

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        if isinstance(new, VirtualTensor) and self._cell.value.owner is None:
            torch.Tensor.data.__set__(self, new.detach())  # type: ignore[attr-defined]
            self._cell = new._cell
        else:
            with torch.no_grad():
                self.detach().copy_(new)

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        owner = self._cell.value.owner
        if owner is not None and owner.keeps_gradient(self._cell.value):
            return owner.gradient_of(self._cell.value)
        return torch.Tensor.grad.__get__(self)  # type: ignore[union-attr]

    @grad.setter
    def grad(self, new: Tensor | None) -> None:
        owner = self._cell.value.owner
        if owner is not None and owner.keeps_gradient(self._cell.value):
            owner.set_gradient(self._cell.value, new)
        else:
            torch.Tensor.grad.__set__(self, new)  # type: ignore[union-attr]

    def host_value(self) -> Tensor:
        """The value as a CPU tensor that the caller must not change; waits if it must.

        A promise is kept here once read; what workers own (and what lies in a file) stays where it is.
        """
        value = self._cell.value
        stays = value.owner is not None or isinstance(value, (View, InFile))
        return value.read() if stays else self._cell.read_here().tensor

    def register_hook(self, hook: Any) -> Any:
        self._refuse_hook_on_parameter("register_hook")
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        self._refuse_hook_on_parameter("register_post_accumulate_grad_hook")
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _refuse_hook_on_parameter(self, name: str) -> None:
        if getattr(self, "_is_param", False):
            raise UnsupportedError(
                f"Parameter.{name}: gradients of parameters stay on the workers, where the hook would not run.",
                allowed="Reading and changing parameter.grad after backward(); hooks on other tensors.",
                fix="parameter.grad.mul_(2)  # after loss.backward()",
            )

    def to_host(self) -> Tensor:
        """The value as an ordinary CPU tensor, detached and independent of this one; waits if it must."""
        with torch._C.DisableTorchFunction():
            return self.host_value().detach().clone()

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
        """Pickles (and so `torch.save`s) as the ordinary CPU tensor it stands for: the file loads without us."""
        return self.as_plain().__reduce_ex__(protocol)

    def as_plain(self) -> Tensor:
        """An ordinary CPU tensor (or `nn.Parameter`) with the value and `requires_grad` of this one."""
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
        raise TypeError("a virtual tensor has no tensors inside: it cannot be traced by torch.compile")

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        raise TypeError("a virtual tensor has no tensors inside: it cannot be traced by torch.compile")

    # -- what PyTorch asks it --------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from moreh_ap.device.redirect import redirect

        with torch._C.DisableTorchFunctionSubclass():
            return redirect(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _ALIASES:
            return VirtualTensor(args[0]._cell, args[0])
        leaves = tree_leaves((args, kwargs))
        virtual = [leaf for leaf in leaves if isinstance(leaf, VirtualTensor)]
        device = _common_device(func, virtual, leaves)

        values = [tensor._cell.settle() for tensor in virtual]
        owner = next((value.owner for value in values if value.owner is not None), None)
        if owner is not None:
            result = owner.run_operation(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func in _NEEDS_ONLY_METADATA:
            stand_in = torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype)
            return _wrap(func(stand_in, *args[1:], **kwargs), device)
        if func.is_view and not isinstance(values[0], (Here, InFile)) and isinstance(args[0], VirtualTensor):
            view = _view_of_absent(func, args, kwargs, device)
            if view is not None:
                return view
        elif _may_defer(func, values, leaves):
            deferred = _defer(func, args, kwargs, device)
            if deferred is not None:
                return deferred
        elif _may_defer_in_place(func, args, values, leaves):
            replaced = _replace_later(func, args, kwargs, device)
            if replaced is not None:
                return replaced
        return _compute_here(func, args, kwargs, device)


def to_accelerator(tensor: Tensor) -> VirtualTensor:
    """A copy of a CPU tensor on the accelerator, differentiable like `Tensor.cuda`."""
    return _ToAccelerator.apply(tensor) if tensor.requires_grad else place(tensor.detach().clone())


def place(tensor: Tensor) -> VirtualTensor:
    """An accelerator tensor whose value is `tensor` itself: nothing is copied, so the caller must not keep it."""
    return VirtualTensor(Cell(Here(tensor), ACCELERATOR), tensor)


def to_host(tensor: VirtualTensor) -> Tensor:
    """An ordinary CPU tensor with the value of `tensor`, differentiable like `Tensor.cpu`; waits if it must."""
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


def _common_device(func: Any, virtual: list[VirtualTensor], leaves: list[Any]) -> torch.device:
    """The device of the operation's result; PyTorch's usual error where devices are mixed."""
    device = ACCELERATOR if any(tensor.is_cuda for tensor in virtual) else CPU
    if device == ACCELERATOR and func not in _TAKES_BOTH_DEVICES:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.device.type == "cpu":
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:0 and cpu! (when checking arguments of {func.name()})"
                )
    return device


def _wrap(result: Any, device: torch.device) -> Any:
    if device == CPU:
        return result
    return tree_map(lambda leaf: place(leaf) if type(leaf) is Tensor else leaf, result)


def _compute_here(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Read every input, compute on the CPU, write back what the operation changed."""
    written = _written_arguments(func, args, kwargs)
    written_ids = {id(tensor) for tensor in written}
    host_of: dict[int, Tensor] = {}

    def read(tensor: VirtualTensor) -> Tensor:
        if id(tensor) not in host_of:
            becomes_here = isinstance(tensor._cell.value, InFile) and id(tensor) in written_ids
            host_of[id(tensor)] = tensor._cell.read_here().tensor if becomes_here else tensor.host_value()
        return host_of[id(tensor)]

    host_args, host_kwargs = tree_map_only(VirtualTensor, read, (args, kwargs))
    result = func(*host_args, **host_kwargs)
    for tensor in written:
        value = tensor._cell.value
        if not isinstance(value, Here):
            value.write(host_of[id(tensor)])
    if torch.Tag.inplace_view in func.tags:
        with torch.utils._mode_utils.no_dispatch():
            func(*args, **kwargs)
    virtual_of = {id(host_of[id(tensor)]): tensor for tensor in written}
    result = tree_map_only(
        Tensor, lambda leaf: virtual_of[id(leaf)] if id(leaf) in virtual_of else _wrap(leaf, device), result
    )
    if func.is_view:
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, VirtualTensor):
                tensor._cell.has_views = True
    return result


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[VirtualTensor]:
    written: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tree_leaves(args[index] if index < len(args) else kwargs.get(argument.name))
    return [tensor for tensor in written if isinstance(tensor, VirtualTensor)]


def meta_of(tree: Any) -> Any:
    """`tree` with every tensor replaced by a meta tensor of its shape, strides and dtype."""
    return tree_map_only(
        Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta"), tree
    )


def _view_of_absent(func: Any, args: Any, kwargs: Any, device: torch.device) -> VirtualTensor | None:
    base = args[0]
    if base._cell.value.owner is None and not isinstance(base._cell.value, View):
        return None  # a promised value: read it and take an ordinary view
    meta = func(*meta_of(args), **kwargs)
    if not isinstance(meta, Tensor):
        return None
    rest = args[1:]
    return VirtualTensor(Cell(View(base._cell, lambda whole: func(whole, *rest, **kwargs)), device), meta)


def _may_defer(func: Any, values: list[Value], leaves: list[Any]) -> bool:
    """True for a small, pure operation of which an input is still promised: a step that reads nothing never waits."""
    return not func.is_view and not func._schema.is_mutable and _inputs_may_be_deferred(func, values, leaves)


def _may_defer_in_place(func: Any, args: Any, values: list[Value], leaves: list[Any]) -> bool:
    """True for ``total += loss`` while `loss` is promised, if nothing else looks at the memory of `total`."""
    return (
        torch.Tag.pointwise in func.tags
        and func._schema.name.endswith("_")
        and isinstance(args[0], VirtualTensor)
        and not args[0]._cell.has_views
        and _inputs_may_be_deferred(func, values, leaves)
    )


def _inputs_may_be_deferred(func: Any, values: list[Value], leaves: list[Any]) -> bool:
    return (
        not all(value.ready() for value in values)
        and all(value.owner is None and not isinstance(value, View) for value in values)
        and torch.Tag.nondeterministic_seeded not in func.tags
        and torch.Tag.data_dependent_output not in func.tags
        and torch.Tag.dynamic_output_shape not in func.tags
        and all(leaf.numel() <= MAX_DEFERRED_ELEMENTS for leaf in leaves if isinstance(leaf, Tensor))
    )


def _defer(func: Any, args: Any, kwargs: Any, device: torch.device) -> VirtualTensor | None:
    meta = func(*meta_of(args), **{**meta_of(kwargs), **({"device": "meta"} if kwargs.get("device") else {})})
    if not isinstance(meta, Tensor) or meta.numel() > MAX_DEFERRED_ELEMENTS:
        return None

    def snapshot(tensor: Tensor) -> Value:
        if not isinstance(tensor, VirtualTensor):
            return Here(tensor.clone())
        value = tensor._cell.value
        return Here(value.tensor.clone()) if isinstance(value, Here) else value

    later_args, later_kwargs = tree_map_only(Tensor, snapshot, (args, kwargs))
    return VirtualTensor(Cell(Later(func, later_args, later_kwargs), device), meta)


def _replace_later(func: Any, args: Any, kwargs: Any, device: torch.device) -> VirtualTensor | None:
    """Put off an in-place operation: the tensor's value becomes that of the operation's functional form."""
    target: VirtualTensor = args[0]
    packet = getattr(aten, func._opname[:-1], None)
    functional = getattr(packet, func._overloadname, None)
    deferred = None if functional is None else _defer(functional, args, kwargs, device)
    if deferred is None or deferred.shape != target.shape or deferred.dtype != target.dtype:
        return None
    target._cell.value = deferred._cell.value
    return target


def has_accelerator_tensor(tree: Any) -> bool:
    """True if a leaf of `tree` is a tensor on the accelerator."""
    return any(isinstance(leaf, VirtualTensor) and leaf.is_cuda for leaf in tree_flatten(tree)[0])
