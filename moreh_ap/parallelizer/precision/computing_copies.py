"""Copies of parameters in the dtype that a plan computes in, which replace the parameters while a forward runs.

Decides when a copy is made, how its gradient becomes that of the parameter, and in which dtype modules get their
inputs. Must not know plans, batches, or how gradients are summed over workers.

[Note: why not FSDP2]
FSDP2 computes in bfloat16 and keeps float32 parameters, also where nothing is sharded. Its parameters are DTensors
then, which pass through Python in each operation of an optimizer, and each of its units gathers from itself, copies
what it gathered, and reduces to itself. For small layers that is more than half of a worker's processor time a step
(docs/benchmarks.md#gpus), and a small model's step on a GPU takes as long as its processor does. A copy is one
operation for all parameters of a unit, the parameters stay ordinary tensors, and kernels keep their memory format.

[Note: one node a unit]
The copies of a unit (a block, or a large layer outside of blocks) are the results of one autograd function. Its
backward runs when the gradients of the whole unit have come, while the backward goes on in the unit before it, and
gives each parameter a gradient of the parameter's dtype. So gradients are added up over micro-batches and summed over
workers in float32, as FSDP2 does with `reduce_dtype`.

[Note: in their place]
During a forward `module._parameters` holds the copies, which `isinstance(..., nn.Parameter)` takes for parameters: code
that lists the parameters, or asks for the dtype of one, sees the dtype in which it computes. Afterwards the
parameters are back, before anything reads or writes them. A block that runs again in the backward (`recompute.py`)
finds the copies of its first run (`in_place_again`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moreh_ap.parallelizer.precision.output_precision import converted

LEAST_LARGE_ELEMENTS = 2**20
"""From how many elements on a parameter outside of blocks is a unit of its own: the gradient of a head need not wait
for that of the embedding."""

_ATTRIBUTE = "_moreh_computing_copies"


def compute_in(
    module: nn.Module,
    dtype: torch.dtype,
    blocks: Sequence[nn.Module],
    whole: Collection[nn.Module],
    ignored: Collection[nn.Parameter],
) -> None:
    """Has forwards of `module` compute in `dtype`: on copies of its floating-point parameters, with such inputs.

    Args:
        module: The model, called as a whole or by `calling` in `fsdp.py`.
        dtype: The dtype in which it computes.
        blocks: Its repeated blocks, whose inputs are converted, too.
        whole: Modules whose own parameters are used as they are.
        ignored: Parameters that are used as they are.
    """
    if any(isinstance(layer, nn.RNNBase) for layer in module.modules()):
        allow_weights_apart()
    as_they_are, left_out = {id(one) for one in whole}, {id(parameter) for parameter in ignored}

    def slots(modules: Iterable[nn.Module]) -> list[_Slot]:
        return [
            (owner, name, parameter)
            for owner in modules
            if id(owner) not in as_they_are
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.is_floating_point() and id(parameter) not in left_out
        ]

    inside = {id(submodule) for block in blocks for submodule in block.modules()}
    outside = slots(submodule for submodule in module.modules() if id(submodule) not in inside)
    large = {id(one): one for _, _, one in outside if one.numel() >= LEAST_LARGE_ELEMENTS}
    of_large = [[slot for slot in outside if slot[2] is one] for one in large.values()]
    rest = [slot for slot in outside if id(slot[2]) not in large]
    units = [rest, *of_large, *(slots(block.modules()) for block in blocks)]
    copies = _ComputingCopies(dtype, [[slot[:2] for slot in unit] for unit in units if unit])
    object.__setattr__(module, _ATTRIBUTE, copies)
    for block in blocks:
        block.register_forward_pre_hook(_Cast(dtype), prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(_Cast(dtype), prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(lambda *unused: copies.enter(), prepend=True)
    module.register_forward_hook(lambda *unused: copies.leave(), always_call=True)


def allow_weights_apart() -> None:
    """Has cuDNN not warn of weights of a recurrent layer that lie apart, which it copies for each call."""
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")


def computes_on_copies(module: nn.Module) -> bool:
    """Says whether `compute_in` was called for the module."""
    return _ATTRIBUTE in module.__dict__


class _Cast:
    """A forward pre-hook that converts floating-point tensors among a module's inputs.

    Args:
        dtype: The dtype that the module gets.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return converted((args, kwargs), self._convert)

    def _convert(self, leaf: Tensor) -> Tensor:
        return leaf.to(self._dtype) if leaf.dtype != self._dtype and leaf.is_floating_point() else leaf


class _ToDtype(torch.autograd.Function):
    """Copies of tensors in another dtype; their gradients in the dtype of the tensors. See [Note: one node a unit]."""

    @staticmethod
    def forward(context: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        context.set_materialize_grads(False)
        context.dtypes = [tensor.dtype for tensor in tensors]
        return tuple(_copied(tensors, [dtype] * len(tensors)))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [(one, dtype) for one, dtype in zip(gradients, context.dtypes, strict=True) if one is not None]
        found = iter(_copied([one for one, _ in present], [dtype for _, dtype in present]))
        return None, *(None if one is None else next(found) for one in gradients)


def _copied(tensors: Sequence[Tensor], dtypes: Iterable[torch.dtype]) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


class _ComputingCopies:
    """The copies of a model. See [Note: in their place].

    Args:
        dtype: The dtype of the copies.
        units: The parameters of each unit, by the modules that have them. See [Note: one node a unit].
    """

    def __init__(self, dtype: torch.dtype, units: Sequence[Sequence[tuple[nn.Module, str]]]) -> None:
        self._dtype, self._units = dtype, units
        self._entered = 0
        self._originals: list[_Slot] = []

    def enter(self) -> None:
        """Puts copies in place of the parameters, unless a forward of the model has called the model again."""
        self._entered += 1
        if self._entered > 1:
            return
        with torch._C.DisableTorchFunction():  # modes of a forward have nothing to do with it
            self._put_copies()

    def _put_copies(self) -> None:
        copies: dict[int, Tensor] = {}
        now = [[(*slot, parameter) for slot in unit if (parameter := _held(*slot)) is not None] for unit in self._units]
        for unit in now:
            own = {id(slot[2]): slot[2] for slot in unit if id(slot[2]) not in copies and slot[2].dtype != self._dtype}
            copies.update(self._copies(list(own.values())))
        self._originals = [slot for unit in now for slot in unit if id(slot[2]) in copies]
        _put([(owner, name, copies[id(parameter)]) for owner, name, parameter in self._originals])

    def leave(self) -> None:
        """Puts the parameters back once the outermost forward has ended."""
        self._entered = max(0, self._entered - 1)  # a pre-hook before `enter` may have raised
        if self._entered == 0:
            _put(self._originals)
            self._originals = []

    def _copies(self, parameters: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        for trained in (True, False):
            chosen = [one for one in parameters if one.requires_grad is trained]
            if chosen:
                made: Sequence[Tensor] = _ToDtype.apply(self._dtype, *chosen)  # type: ignore[no-untyped-call]
                for one, copy in zip(chosen, made, strict=True):
                    copy._is_param = True
                    yield id(one), copy


_Slot = tuple[nn.Module, str, Tensor]
"""A module, the name of one of its parameters, and the tensor that is or comes to be there."""


def _held(owner: nn.Module, name: str) -> Tensor | None:
    held: Tensor | None = owner._parameters.get(name)
    return held


def _put(slots: Iterable[_Slot]) -> None:
    """Puts tensors in place of parameters. A recurrent layer computes with a list of them."""
    recurrent = {}
    for owner, name, tensor in slots:
        owner._parameters[name] = tensor  # type: ignore[assignment]
        if isinstance(owner, nn.RNNBase):
            recurrent[id(owner)] = owner
    for layer in recurrent.values():
        layer.__dict__["_flat_weights"] = [weight for weights in layer.all_weights for weight in weights]


def in_place_again(block: nn.Module) -> Callable[[], Any]:
    """Returns a function that puts a block's present copies in place of its parameters again, for a second run."""
    slots = [
        (owner, name, tensor)
        for owner in block.modules()
        for name in owner._parameters
        if type(tensor := _held(owner, name)) is Tensor  # no parameter, but a copy of one
    ]

    @contextmanager
    def again() -> Iterator[None]:
        before: list[_Slot] = [
            (owner, name, now) for owner, name, _ in slots if (now := _held(owner, name)) is not None
        ]
        _put(slots)
        try:
            yield
        finally:
            _put(before)

    return again
