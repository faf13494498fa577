"""Operations on virtual tensors, below autograd: computed in the controller, deferred, or run on the workers.

The *rule of completeness*: an operation without a fast path reads its inputs, computes on the controller's CPU and
writes back the tensors that it changed. This module must not know how workers are reached: values on the workers
provide `Value.runner`.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from moreh_ap.device.operation_kinds import (
    ALIASES,
    FOLLOWS_ORDER,
    NEEDS_ONLY_METADATA,
    NOT_PLAIN,
    TAKES_BOTH_DEVICES,
    WRITES_UNSAID,
    Form,
    form_of,
)
from moreh_ap.device.tensor import ACCELERATOR, CPU, VirtualTensor, place
from moreh_ap.device.tensor_classes import WANTED
from moreh_ap.device.values import (
    MAX_DEFERRED_ELEMENTS,
    MIN_DIMS_OF_UNKNOWN_ORDER,
    Cell,
    Here,
    InFile,
    Later,
    Value,
    View,
    leaves_of,
    mapped,
)

aten = torch.ops.aten

_NEVER_DEFERRED = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MOST_RESULTS = 4096
_RESULTS: dict[Any, Tensor | None] = {}


class _Asked(threading.local):
    """Arguments of the PyTorch function that this thread is calling; None in a backward pass."""

    arguments: Any = None


ASKED = _Asked()


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of an ATen operation with a virtual tensor among its arguments.

    Raises:
        RuntimeError: CPU and accelerator tensors are mixed, as PyTorch raises it.
    """
    if func is aten.detach.default and not torch.is_inference_mode_enabled():  # autograd's, once for each gradient
        return VirtualTensor.__new__(WANTED.kind or VirtualTensor, args[0]._cell, args[0])
    if func is aten._local_scalar_dense.default:  # `float(loss)`, `loss > 1` in a condition
        return args[0].host_value().item()
    result = _compute_plain(func, args, kwargs)
    if result is not NotImplemented:
        return result
    if torch.is_inference_mode_enabled() and func.is_view:
        parts = func.decompose(*args, **kwargs)  # PyTorch comes here before it takes `to` or `contiguous` apart
        if parts is not NotImplemented:
            return parts
        if not args[0].is_inference():
            with torch.inference_mode(False):  # in this mode too, a view of an ordinary tensor is an ordinary tensor
                return run(func, args, kwargs)
    if func in ALIASES or (func is aten.view.default and args[0].size() == torch.Size(args[1])):
        kind = WANTED.kind or VirtualTensor
        return VirtualTensor.__new__(kind, args[0]._cell, args[0])
    leaves = leaves_of(args, kwargs)
    virtual = [leaf for leaf in leaves if isinstance(leaf, VirtualTensor)]
    device = _common_device(func, virtual, leaves)

    values = [tensor._cell.settle() for tensor in virtual]
    for value in values:
        runner = value.runner()
        if runner is not None:
            result = runner(func, args, kwargs)
            if result is not NotImplemented:
                return result
            break
    if func in NEEDS_ONLY_METADATA:
        like = _in_known_order(args[0], values[0]) if func in FOLLOWS_ORDER else args[0]
        stand_in = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
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


def _compute_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of a plain operation; NotImplemented if it is none.

    [Note: plain operations]
    Most operations of a script (and all of a model that runs in the controller) take accelerator tensors whose values
    are here, in their positional arguments or in lists there, and numbers. For these nothing has to be looked for in
    nested arguments, which would take several times as long as a small operation itself.
    """
    form = form_of(func)
    if form is None or "device" in kwargs:
        return NotImplemented
    is_view = form is Form.VIEW or form is Form.VIEWS
    if is_view and (torch.is_inference_mode_enabled() or not isinstance(args[0], VirtualTensor)):
        return NotImplemented
    host_args: list[Any] = []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            host = _here(arg)
            if host is None:
                return NotImplemented
            host_args.append(host)
        elif type(arg) in (list, tuple) and arg and any(isinstance(element, Tensor) for element in arg):
            hosts = [_here(element) if isinstance(element, Tensor) else element for element in arg]
            if any(host is None and element is not None for host, element in zip(hosts, arg)):
                return NotImplemented
            host_args.append(hosts)
        else:
            host_args.append(arg)
    host_kwargs = dict(zip(kwargs, host_args[len(args) :])) if kwargs else kwargs
    result = func(*host_args[: len(args)], **host_kwargs)
    if form is Form.IN_PLACE:
        return args[0]
    if form is Form.NEW:
        return place(result) if type(result) is Tensor else _wrap(result, ACCELERATOR)
    if form is Form.IN_PLACE_EACH:
        return None
    args[0]._cell.has_views = True
    if form is Form.VIEWS:
        views = [place(view) for view in result]
        for view in views:
            view._cell.has_views = True
        return views
    view = place(result)
    view._cell.has_views = True
    return view


def _here(tensor: Tensor) -> Tensor | None:
    """Returns the value of an accelerator tensor that is in the controller, or a CPU number; None for others."""
    if not isinstance(tensor, VirtualTensor):
        return tensor if tensor.dim() == 0 else None
    cell = tensor._cell
    return cell.value.tensor if type(cell.value) is Here and cell.device is ACCELERATOR else None


def _common_device(func: Any, virtual: list[VirtualTensor], leaves: list[Any]) -> torch.device:
    """Returns the device of the operation's result; raises PyTorch's usual error for mixed devices."""
    device = CPU
    for tensor in virtual:
        if tensor.is_cuda:
            device = ACCELERATOR
            break
    if device == ACCELERATOR and func not in TAKES_BOTH_DEVICES and any(map(_is_on_cpu, leaves)):
        # PyTorch's composite functions make tensors on the CPU: these may be mixed with accelerator tensors.
        if not any(map(_is_on_cpu, tree_leaves(ASKED.arguments))):
            return device
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and cpu! (when checking arguments of {func.name()})"
        )
    return device


def _is_on_cpu(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(leaf):  # a transform's wrapper says that it is on the CPU
        leaf = torch._C._functorch.get_unwrapped(leaf)
    return bool(leaf.device.type == "cpu")


def _in_known_order(tensor: VirtualTensor, value: Value) -> Tensor:
    """Returns a tensor with the strides of a virtual tensor: its value, if that was promised in another order."""
    if tensor.dim() < MIN_DIMS_OF_UNKNOWN_ORDER:
        return tensor
    if isinstance(value, Here):
        return value.tensor
    return tensor if value.is_order_known() else tensor.host_value()


def _wrap(result: Any, device: torch.device) -> Any:
    if device == CPU:
        return result
    return tree_map(lambda leaf: place(leaf) if type(leaf) is Tensor else leaf, result)


def _compute_here(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Reads all inputs, computes on the CPU, and writes back the tensors that the operation changed."""
    written = written_arguments(func, args, kwargs)
    written_ids = {id(tensor) for tensor in written}
    host_of: dict[int, Tensor] = {}

    def read(tensor: VirtualTensor) -> Tensor:
        if id(tensor) not in host_of:
            becomes_here = isinstance(tensor._cell.value, InFile) and id(tensor) in written_ids
            host_of[id(tensor)] = tensor._cell.read_here().tensor if becomes_here else tensor.host_value()
        return host_of[id(tensor)]

    host_args, host_kwargs = mapped(VirtualTensor, read, args, kwargs)
    result = func(*host_args, **host_kwargs)
    for tensor in written:
        value, is_view = tensor._cell.value, torch.Tag.inplace_view in func.tags
        if isinstance(value, View) and is_view and func not in NOT_PLAIN:  # `squeeze_`: it is another view from now on
            seen = View(tensor._cell, lambda whole: func(whole.view_as(whole), *args[1:], **kwargs))
            tensor._use(Cell(seen, device))
        elif not isinstance(value, Here):
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


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[VirtualTensor]:
    """Returns the tensors that the operation changes."""
    written: list[Any] = []
    unsaid = WRITES_UNSAID.get(func, ())
    for index, argument in enumerate(func._schema.arguments):
        is_said = argument.alias_info is not None and argument.alias_info.is_write
        if is_said or argument.name in unsaid:
            written += tree_leaves(args[index] if index < len(args) else kwargs.get(argument.name))
    return [tensor for tensor in written if isinstance(tensor, VirtualTensor)]


def meta_of(tree: Any) -> Any:
    """Returns `tree` with every tensor replaced by a meta tensor of its shape, strides and dtype."""
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
    """Returns whether a small, pure operation can be deferred since an input is still a promise; so no step waits."""
    return not func.is_view and not func._schema.is_mutable and _inputs_may_be_deferred(func, values, leaves)


def _may_defer_in_place(func: Any, args: Any, values: list[Value], leaves: list[Any]) -> bool:
    """Returns whether ``total += loss`` can be deferred: `loss` is a promise, `total` shares memory with none."""
    return (
        torch.Tag.pointwise in func.tags
        and func._schema.name.endswith("_")
        and isinstance(args[0], VirtualTensor)
        and not args[0]._cell.has_views
        and _inputs_may_be_deferred(func, values, leaves)
    )


def _inputs_may_be_deferred(func: Any, values: list[Value], leaves: list[Any]) -> bool:
    is_waited_for = False
    for value in values:
        if value.owner is not None or isinstance(value, View):
            return False
        is_waited_for = is_waited_for or not value.ready()
    if not _NEVER_DEFERRED.isdisjoint(func.tags):
        return False
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.numel() > MAX_DEFERRED_ELEMENTS:
            return False
    return is_waited_for


def _result_on_meta(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Returns a meta tensor like the result of an operation, or None where that is no tensor.

    The same object for arguments that look alike: a script repeats its operations, and PyTorch computes many results
    on meta by functions of Python.
    """
    form: list[Any] = [func, torch.get_default_dtype(), len(args), *kwargs]
    for arg in (*args, *kwargs.values()):
        is_list = type(arg) is list or type(arg) is tuple
        for one in arg if is_list else (arg,):
            form += (one.size(), one.stride(), one.dtype) if isinstance(one, Tensor) else (type(one), one)
        form.append(is_list)
    key = tuple(form)
    if key not in _RESULTS:
        if len(_RESULTS) >= _MOST_RESULTS:
            _RESULTS.clear()
        result = func(*meta_of(args), **{**meta_of(kwargs), **({"device": "meta"} if kwargs.get("device") else {})})
        _RESULTS[key] = result if isinstance(result, Tensor) else None
    return _RESULTS[key]


def _defer(func: Any, args: Any, kwargs: Any, device: torch.device) -> VirtualTensor | None:
    meta = _result_on_meta(func, args, kwargs)
    if meta is None or meta.numel() > MAX_DEFERRED_ELEMENTS:
        return None

    def snapshot(tensor: Tensor) -> Value:
        if not isinstance(tensor, VirtualTensor):
            return Here(tensor.clone())
        value = tensor._cell.value
        return Here(value.tensor.clone()) if isinstance(value, Here) else value

    later_args, later_kwargs = mapped(Tensor, snapshot, args, kwargs)
    return VirtualTensor(Cell(Later(func, later_args, later_kwargs), device), meta)


def _replace_later(func: Any, args: Any, kwargs: Any, device: torch.device) -> VirtualTensor | None:
    """Defers an in-place operation: the tensor's value becomes the result of the operation's functional form."""
    target: VirtualTensor = args[0]
    packet = getattr(aten, func._opname[:-1], None)
    functional = getattr(packet, func._overloadname, None)
    deferred = None if functional is None else _defer(functional, args, kwargs, device)
    if deferred is None or deferred.shape != target.shape or deferred.dtype != target.dtype:
        return None
    target._cell.value = deferred._cell.value
    return target


VirtualTensor.torch_dispatch = staticmethod(run)
