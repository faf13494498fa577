"""Parameters of a module that share memory, as in ``decoder.weight = nn.Parameter(encoder.weight.t())``.

A move from the CPU to a device gives each its own memory, in PyTorch as here, so that they train apart from then on; a
script that stays on the CPU trains them together. Where a script makes them share memory after the move, workers have a
copy of each. Decides which ones these are and what the script is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.values import Here


def sharing(module: nn.Module) -> dict[str, str]:
    """Returns names of parameters in the memory of another one of the module, with the name of that other one.

    Parameters of one memory that do not overlap, as parts of a vector, share none; neither do frozen ones.
    """
    spans: dict[int, list[tuple[int, int, str, Tensor]]] = {}
    found: dict[str, str] = {}
    for name, parameter, held in _held(module):
        steps = int(sum((size - 1) * stride for size, stride in zip(held.shape, held.stride())))
        first = int(held.storage_offset()) * held.itemsize
        last = first + steps * held.itemsize
        others = spans.setdefault(held.untyped_storage().data_ptr(), [])
        for start, stop, other, tensor in others:
            if first <= stop and start <= last and (parameter.requires_grad or tensor.requires_grad):
                found[name] = other
        others.append((first, last, name, parameter))
    return found


def _held(module: nn.Module) -> Iterable[tuple[str, Tensor, Tensor]]:
    """Yields names and parameters whose values this process has, and the values."""
    for name, parameter in module.named_parameters():
        held: Tensor = parameter
        if isinstance(parameter, VirtualTensor) and isinstance(parameter._cell.value, Here):
            held = parameter._cell.value.tensor
        elif type(parameter) is not nn.Parameter or torch._C._functorch.is_functorch_wrapped_tensor(held):
            continue  # of a class of its own, or made inside of a transform of `torch.func`
        if held.device.type == "cpu" and held.layout is torch.strided and held.numel():
            yield name, parameter, held


def warn_of_copies(module: nn.Module, shared: dict[str, str], stacklevel: int) -> None:
    """Tells the script which parameters on the accelerator are no longer in the memory of others.

    Args:
        module: The module.
        shared: What `sharing` has returned.
        stacklevel: How many calls above this one the script's line is.
    """
    apart = [name for name in shared if isinstance(module.get_parameter(name), VirtualTensor)]
    if apart:
        name = apart[0]
        warnings.warn(
            f"the parameter '{name}' shared the memory of '{shared[name]}'. From now on each has its own, as after a "
            "move to a device in PyTorch, and they are trained apart. To train one weight, use one parameter in both "
            f"places: F.linear(x, self.{shared[name]}.t(), bias)",
            stacklevel=stacklevel + 1,
        )


def take_apart(module: nn.Module) -> None:
    """Gives parameters on the accelerator that are in the memory of others a copy of their own; a warning says so."""
    shared = sharing(module)
    for name in shared:
        parameter = module.get_parameter(name)
        if isinstance(parameter, VirtualTensor):
            with torch.no_grad():
                parameter._use(parameter.detach().clone()._cell)  # type: ignore[attr-defined]
    warn_of_copies(module, shared, stacklevel=2)
