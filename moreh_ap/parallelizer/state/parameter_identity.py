"""Parameters that are one object from the script's model on to forwards under FSDP2.

A module may keep its parameters a second time in an object or a list (`self.weight = Gaussian(self.mu, self.rho)`).
FSDP2 puts parameters of its own in the place of a module's, so that such an object would keep one without values.
Decides of such parameters which object is the gathered one; must not know when parameters are gathered.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

_LEVELS = 4
_OF_MODULES = frozenset(vars(nn.Module()))
_NO_HOLDERS = (torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType, str, bytes, int, float)

Originals = Mapping[tuple[int, str], nn.Parameter]
"""Parameters by the `id` of the module that has one, and its name there."""


def originals(module: nn.Module) -> Originals:
    """Returns the parameters of `module` that objects and lists hold, too, as they are before FSDP2 manages it."""
    held = _held_aside(module)
    return {
        (id(owner), name): parameter
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if type(parameter) is nn.Parameter and id(parameter) in held
    }


def _held_aside(module: nn.Module) -> set[int]:
    """Returns the `id`s of parameters that attributes of modules hold in objects and containers, a few levels down."""
    found: set[int] = set()
    seen: set[int] = set()

    def search(value: Any, levels: int) -> None:
        if isinstance(value, nn.Parameter):
            found.add(id(value))
        if levels == 0 or isinstance(value, _NO_HOLDERS) or id(value) in seen:
            return
        seen.add(id(value))
        inside = value if isinstance(value, (list, tuple, set, dict)) else getattr(value, "__dict__", {})
        for one in list(inside.values() if isinstance(inside, dict) else inside):
            search(one, levels - 1)

    for owner in module.modules():
        for name, value in list(vars(owner).items()):
            if name not in _OF_MODULES:
                search(value, _LEVELS)
    return found


def tied(module: nn.Module) -> Mapping[tuple[int, str], list[tuple[nn.Module, str]]]:
    """Returns where else in `module` a parameter with several names is: its other modules, and the names there."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, name))
    return {(id(owner), name): same for same in places.values() if len(same) > 1 for owner, name in same}


def keep_tied(found: Mapping[tuple[int, str], list[tuple[nn.Module, str]]], managed: Iterable[Any]) -> None:
    """Has each parameter of FSDP2 be that of all modules that had it. FSDP2 itself looks for them in what it manages:
    in the stage of a pipeline, of which modules with others in them are no part.

    Args:
        found: What `tied` returned before.
        managed: As of `keep`.
    """
    for one in managed:
        info = one._module_info
        known = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
        for owner, name in found.get((id(info.module), info.param_name), ()):
            if all(owner is not other or name != same for other, same in known):
                info.shared_modules.append(owner)
                info.shared_param_names.append(name)
                owner._parameters[name] = one.sharded_param


def keep(found: Originals, managed: Iterable[Any]) -> None:
    """Has each gathered parameter be the object that was the module's own before.

    Args:
        found: What `originals` returned.
        managed: The parameters of FSDP2 (`FSDPParam`), none of which was gathered yet.
    """
    for one in managed:
        info = one._module_info
        original = found.get((id(info.module), info.param_name))
        # PyTorch swaps no tensor with weak references: those of recurrent layers, which look theirs up again.
        if original is not None and not weakref.getweakrefcount(original):
            # From now on others may have weak references. A tensor on meta cannot be given values on a device.
            empty = torch.empty(original.shape, dtype=original.dtype, device=one.device)
            empty.untyped_storage().resize_(0)
            torch.utils.swap_tensors(original, nn.Parameter(empty, original.requires_grad))
            one.init_unsharded_param = _first_gather(one, one.init_unsharded_param, original)


def _first_gather(one: Any, gather: Callable[[], None], original: nn.Parameter) -> Callable[[], None]:
    """Returns a replacement of `gather` until its first run, in which FSDP2 makes the gathered parameter."""

    def run() -> None:
        gather()
        del one.init_unsharded_param  # the class's own from now on
        made = one._unsharded_param
        original.data = made.data  # the same memory
        one._unsharded_param = original.requires_grad_(made.requires_grad)

    return run
