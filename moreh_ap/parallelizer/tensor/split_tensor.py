"""A tensor of which every rank of the tensor axis holds a shard, and that behaves as the full tensor to its users.

Decides which operations keep such a tensor split; all others gather it and go on with the whole. Must not know models,
vocabularies or sequences, except that the cross-entropy of split classes is in `vocabulary.py`.

[Note: never fail]
Logits are split along the vocabulary, and with sequence parallelism hidden states along the sequence. Between the
layers that know this stands code that does not: a model's loss, a softcap, recorded hidden states. DTensor refuses to
mix with plain tensors, which such code does all the time. `SplitTensor` takes every plain tensor as what it is here,
the same on all ranks, and gathers itself where an operation has no split form. It is part of autograd, forward and
backward: the gradient of the whole arrives full or split, and each rank keeps its shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.protocol.shard_rules import ActivationRule, shard_rules

_aten = torch.ops.aten
_KEPT_NAMES = {
    "float", "double", "half", "bfloat16", "to", "type", "view", "reshape", "flatten", "contiguous", "clone", "detach",
    "transpose", "select", "narrow", "unsqueeze", "add", "sub", "mul", "div", "true_divide", "tanh", "neg", "exp",
    "cat", "concat",
    "__getitem__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__",
    "add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__",
}  # fmt: skip
"""Operations with a split form: everything else is given the whole tensor before autograd sees it."""
_FACTS = {
    "size", "dim", "numel", "stride", "element_size", "is_contiguous", "is_floating_point", "is_complex", "__len__",
    "requires_grad_", "retain_grad", "register_hook", "backward", "storage_offset", "nelement", "ndimension",
    "__hash__", "get_device", "type", "data_ptr", "is_signed", "is_inference", "is_shared", "is_same_size",
}  # fmt: skip
"""Functions that need no values of the tensor, and those of autograd."""


_PROPERTIES = {"__get__", "__set__", "__delete__"}

_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Torch functions with a split form of their own, which other modules have registered."""


def computes(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has the decorated function compute a torch function that is called with a `SplitTensor`."""

    def register(split_form: Callable[..., Any]) -> Callable[..., Any]:
        _FUNCTIONS[function] = split_form
        return split_form

    return register


class SplitTensor(Tensor):
    """Wraps one rank's shard of a tensor. See [Note: never fail].

    Attributes:
        local_shard: This rank's shard, without history; use `to_local()` where gradients matter.
        split_dim: The dim that is split; never negative.
        crossing: The ranks that hold the other shards.
    """

    local_shard: Tensor
    split_dim: int
    crossing: Crossing

    @staticmethod
    def __new__(cls, local_shard: Tensor, length: int, split_dim: int, crossing: Crossing) -> SplitTensor:
        shape = (*local_shard.shape[:split_dim], length, *local_shard.shape[split_dim + 1 :])
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=local_shard.dtype, device=local_shard.device)  # type: ignore[attr-defined]
        self.local_shard, self.split_dim, self.crossing = local_shard, split_dim, crossing
        return self

    @classmethod
    def from_local(cls, local_shard: Tensor, length: int, dim: int, crossing: Crossing) -> SplitTensor:
        """Returns the tensor that is `length` long in `dim` and of which this rank has `local_shard`; in autograd."""
        return _FromLocal.apply(local_shard, length, dim % local_shard.ndim, crossing)

    @classmethod
    def cut(cls, complete: Tensor, dim: int, crossing: Crossing) -> SplitTensor:
        """Returns a tensor that every rank has as a split one: each keeps a view of its shard. Unknown to autograd."""
        dim %= complete.ndim
        return cls(_shard_along(complete, dim, crossing), complete.shape[dim], dim, crossing)

    def to_local(self) -> Tensor:
        """Returns this rank's shard. Known to autograd."""
        return _ToLocal.apply(self)

    def full_tensor(self) -> Tensor:
        """Returns the whole as an ordinary tensor, on every rank. Known to autograd. A collective."""
        return _ToWhole.apply(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SplitTensor({tuple(self.shape)}, split_dim={self.split_dim}, here={tuple(self.local_shard.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _FUNCTIONS:
            return _FUNCTIONS[func](*args, **kwargs)
        is_below_autograd = isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        if not is_below_autograd and name not in _KEPT_NAMES | _FACTS | _PROPERTIES:
            args, kwargs = gather_split_tensors((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = shard_rules(func).activation
        result = NotImplemented if rule is None else _CARRY_OUT[rule](func, args, kwargs)
        if result is NotImplemented:
            args, kwargs = tree_map_only(SplitTensor, _gathered, (args, kwargs))
            result = func(*args, **kwargs)
        return result


def gather_split_tensors(value: Any) -> Any:
    """Returns tuples, lists and dicts with every split tensor in them gathered. Known to autograd.

    Other containers stay the objects that they are: a key-value cache is there to be filled.
    """
    return tree_map_only(SplitTensor, SplitTensor.full_tensor, value, is_leaf=is_no_plain_container)


def is_no_plain_container(value: Any) -> bool:
    """Says whether a value is neither a tuple, a list nor a dict: what is in it is its own business."""
    return not isinstance(value, (tuple, list, dict))


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_shard: Tensor, length: int, dim: int, crossing: Crossing) -> SplitTensor:
        ctx.dim, ctx.crossing = dim, crossing
        return SplitTensor(local_shard.detach(), length, dim, crossing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _shard_along(grad, ctx.dim, ctx.crossing), None, None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: SplitTensor) -> Tensor:
        ctx.length, ctx.dim, ctx.crossing = split.shape[split.split_dim], split.split_dim, split.crossing
        return split.local_shard.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return SplitTensor(grad, ctx.length, ctx.dim, ctx.crossing)


class _ToWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: SplitTensor) -> Tensor:
        ctx.dim, ctx.crossing = split.split_dim, split.crossing
        return _gathered(split)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad if isinstance(grad, SplitTensor) else SplitTensor.cut(grad, ctx.dim, ctx.crossing)


def _gathered(split: SplitTensor) -> Tensor:
    with torch.no_grad():
        return split.crossing.gather(split.local_shard.detach(), split.split_dim, split.shape[split.split_dim])


def _shard_along(value: Tensor, dim: int, crossing: Crossing) -> Tensor:
    """Returns this rank's shard along `dim` of a tensor that may be split already."""
    if isinstance(value, SplitTensor):
        if value.split_dim == dim:
            return value.local_shard
        value = _gathered(value)
    start, stop = crossing.shard_range(value.shape[dim])
    return value.narrow(dim, start, stop - start)


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Element by element: on the shards, with the matching slice of every plain tensor."""
    tensors: list[Tensor] = []
    tree_map_only(Tensor, tensors.append, (args, kwargs))
    first = next(t for t in tensors if isinstance(t, SplitTensor))
    shape, dim, length = first.shape, first.split_dim, first.shape[first.split_dim]
    from_end = dim - len(shape)
    for t in tensors:
        if isinstance(t, SplitTensor) and (t.shape != shape or t.split_dim != dim):
            return NotImplemented
        if t.ndim > len(shape) or (t.ndim >= -from_end and t.shape[from_end] not in (1, length)):
            return NotImplemented
    if torch.broadcast_shapes(*(t.shape for t in tensors)) != shape:
        return NotImplemented

    def local(t: Tensor) -> Tensor:
        if isinstance(t, SplitTensor):
            return t.local_shard
        if t.ndim < -from_end or t.shape[from_end] == 1:
            return t
        return _shard_along(t, t.ndim + from_end, first.crossing)

    in_place = isinstance(args[0], Tensor) and func._schema.arguments[0].alias_info is not None
    if in_place and not isinstance(args[0], SplitTensor):
        return NotImplemented
    local_args, local_kwargs = tree_map_only(Tensor, local, (args, kwargs))
    result = func(*local_args, **local_kwargs)
    if in_place:
        return args[0]
    return tree_map_only(Tensor, lambda t: SplitTensor(t, length, dim, first.crossing), result)


def _same_structure(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (split, *rest) = args
    return SplitTensor(
        func(split.local_shard, *rest, **kwargs), split.shape[split.split_dim], split.split_dim, split.crossing
    )


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The split dim must stay what it is: the last one, or one with the same number of elements behind it."""
    split, sizes = args[0], list(args[1])
    dim, length = split.split_dim, split.shape[split.split_dim]
    behind = split.shape[dim + 1 :].numel()
    if -1 in sizes:
        known = -torch.Size(sizes).numel()
        sizes[sizes.index(-1)] = split.numel() // known if known else 0
    for new_dim, size in enumerate(sizes):
        if size == length and torch.Size(sizes[new_dim + 1 :]).numel() == behind:
            sizes[new_dim] = split.local_shard.shape[dim]
            return SplitTensor(split.local_shard.reshape(sizes), length, new_dim, split.crossing)
    return NotImplemented


def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    split, dim = args[0], (args[1] if len(args) > 1 else 0) % args[0].ndim
    if dim == split.split_dim:
        start, stop, step = (*args[2:], *(None, None, None)[len(args) - 2 :]) if len(args) < 5 else args[2:]
        complete = not start and (stop is None or stop >= split.shape[dim]) and step in (None, 1)
        return _same_structure(_aten.alias.default, (split,), {}) if complete else NotImplemented
    return _same_structure(func, args, kwargs)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    split, dim, index = args
    dim %= split.ndim
    if dim == split.split_dim:
        return NotImplemented
    new_dim = split.split_dim - (dim < split.split_dim)
    return SplitTensor(func(split.local_shard, dim, index), split.shape[split.split_dim], new_dim, split.crossing)


def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One after the other in another dim than the split one."""
    tensors, dim = args[0], (args[1] if len(args) > 1 else 0) % args[0][0].ndim
    first = next(t for t in tensors if isinstance(t, SplitTensor))
    split_dim, length = first.split_dim, first.shape[first.split_dim]
    if dim == split_dim or any(t.ndim != first.ndim or t.shape[split_dim] != length for t in tensors):
        return NotImplemented
    if any(isinstance(t, SplitTensor) and t.split_dim != split_dim for t in tensors):
        return NotImplemented
    shards = [_shard_along(t, split_dim, first.crossing) for t in tensors]
    return SplitTensor(func(shards, dim), length, split_dim, first.crossing)


def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    split, dim = args
    dim %= split.ndim + 1
    new_dim = split.split_dim + (dim <= split.split_dim)
    return SplitTensor(func(split.local_shard, dim), split.shape[split.split_dim], new_dim, split.crossing)


def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    split, first, second = args[0], args[1] % args[0].ndim, args[2] % args[0].ndim
    new_dim = {first: second, second: first}.get(split.split_dim, split.split_dim)
    return SplitTensor(func(split.local_shard, first, second), split.shape[split.split_dim], new_dim, split.crossing)


def _select_or_slice_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of what was cut out, in the place where it was; the cut went through another dim."""
    grad, sizes, dim, *rest = args
    dim %= len(sizes)
    is_select = func is _aten.select_backward.default
    split_dim = grad.split_dim + (is_select and dim <= grad.split_dim)
    if dim == split_dim:
        return NotImplemented
    local_sizes = list(sizes)
    local_sizes[split_dim] = grad.local_shard.shape[grad.split_dim]
    return SplitTensor(func(grad.local_shard, local_sizes, dim, *rest), sizes[split_dim], split_dim, grad.crossing)


_CARRY_OUT: dict[ActivationRule, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    ActivationRule.POINTWISE: _pointwise,
    ActivationRule.SAME_DIM: _same_structure,
    ActivationRule.VIEW: _view,
    ActivationRule.SLICE: _slice,
    ActivationRule.SELECT: _select,
    ActivationRule.CAT: _cat,
    ActivationRule.UNSQUEEZE: _unsqueeze,
    ActivationRule.TRANSPOSE: _transpose,
    ActivationRule.CUT_BACKWARD: _select_or_slice_backward,
}
