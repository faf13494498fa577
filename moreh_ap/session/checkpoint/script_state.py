"""What of a script is in its automatic checkpoints: models, optimizers, schedules, loss scales, random streams.

Decides which objects of the script these are and how they are called. Must not know when they are saved, nor how.

[Note: names]
A script that loads gives its model and its optimizer as for a checkpoint that it saved itself. So a single model and a
single optimizer have no names; several models have the names of their classes, and optimizers that of the model whose
parameter is their first. What is there more than once is numbered in the order in which the optimizers began to step.

[Note: two states]
Of random streams a checkpoint has the states after the last step and those before the training call at which it was
saved. In between a script draws noise and augments its batch, which it does again when it goes on: so loading restores
the first ones. It also draws what it does not draw again, or draws once more (a loader's iterator draws a seed, an
evaluation may): so the second ones are restored before the next training call.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from moreh_ap import device
from moreh_ap.errors import UnsupportedError
from moreh_ap.local import garbage_at_start
from moreh_ap.session.checkpoint.checkpoint_folder import Checkpoint
from moreh_ap.session.checkpoint.checkpoint_values import decode

_Object = TypeVar("_Object")

AFTER_STEP, BEFORE_CALL = "after_step", "before_call"


class ScriptState(NamedTuple):
    """The objects of a script that train.

    Attributes:
        model: The model, or models by name.
        optimizer: The optimizer, or optimizers by name.
        extra: State dicts: ``scheduler`` and ``scaler``, where the script has some; by name if there are several.
    """

    model: nn.Module | Mapping[str, nn.Module]
    optimizer: Optimizer | Mapping[str, Optimizer]
    extra: dict[str, Any]


def find(optimizers: Sequence[Optimizer], *, collects: bool = True) -> ScriptState:
    """Returns what trains with these optimizers.

    A model is the outermost module that has parameters of one of them.

    Args:
        optimizers: In the order in which they began to step; at least one.
        collects: Whether to collect garbage before: a model may be in a wrapper that the script has dropped.

    Raises:
        UnsupportedError: A parameter is in no module.
    """
    garbage_at_start.include_older_objects()  # what is left out is not among `gc.get_objects`
    if collects:
        gc.collect()
    found = _living((nn.Module, LRScheduler, torch.amp.GradScaler))
    modules = [module for module in found[nn.Module] if not type(module).__module__.startswith("moreh_ap.")]
    root_of = _roots(modules, {id(p) for optimizer in optimizers for p in _parameters(optimizer)})
    roots: list[nn.Module] = []
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            if id(parameter) not in root_of:
                raise UnsupportedError(
                    f"a parameter of shape {tuple(parameter.shape)} is in no module: automatic checkpoints lack it",
                    "parameters of modules",
                    "moreh_ap.save(folder, model=model, optimizer=optimizer)  # without MOREH_AUTOSAVE",
                )
            roots += [root for root in root_of[id(parameter)] if not any(root is known for known in roots)]
    names = _numbered(type(root).__name__ for root in roots)
    name_of = {id(root): name for name, root in zip(names, roots)}
    owners = [name_of[id(root_of[id(next(iter(_parameters(one))))][0])] for one in optimizers]
    named = dict(zip(_numbered(owners), optimizers))
    extra = {}
    schedules = _schedules(found[LRScheduler], named)
    if schedules:
        extra["scheduler"] = _single_or_named(schedules)
    scalers = [scaler.state_dict() for scaler in found[torch.amp.GradScaler] if scaler.is_enabled()]
    if len(scalers) == 1:
        extra["scaler"] = scalers[0]
    return ScriptState(_single_or_named(dict(zip(names, roots))), _single_or_named(named), extra)


def random_streams() -> dict[str, Any]:
    """Returns the states of this process's own random streams, and of the accelerator's."""
    session = _session()
    generator = None if session is None else session.generator.state().hex()
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    return states | {"generator": generator}


def restore_random_streams(checkpoint: Checkpoint, extra: dict[str, Any]) -> None:
    """Restores what a checkpoint has of random streams. See [Note: two states]."""
    session, generator = _session(), checkpoint.content["generator"]
    encoded = checkpoint.content.get("random")
    if encoded is None:
        if session is not None and generator:
            session.generator.set_state(bytes.fromhex(generator))
        return
    states = decode(encoded, checkpoint.read)
    _set_random_streams(states[AFTER_STEP])
    if session is not None and session.autosave is not None:
        session.autosave.resumed(extra["steps"], lambda: _set_random_streams(states[BEFORE_CALL]))


def _set_random_streams(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    session = _session()
    if session is not None and states["generator"]:
        session.generator.set_state(bytes.fromhex(states["generator"]))


def _session() -> Any:
    accelerator = device.current()
    return None if accelerator is None else accelerator.session


def _living(classes: Sequence[type[Any]]) -> dict[type[Any], list[Any]]:
    """Returns the living objects of classes. Asks the types, since proxies answer for other objects."""
    kinds: dict[type[Any], type[Any] | None] = {}
    found: dict[type[Any], list[Any]] = {kind: [] for kind in classes}
    for one in gc.get_objects():
        its_type = type(one)
        if its_type not in kinds:
            kinds[its_type] = next((kind for kind in classes if issubclass(its_type, kind)), None)
        kind = kinds[its_type]
        if kind is not None:
            found[kind].append(one)
    return found


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _roots(modules: Sequence[nn.Module], wanted: set[int]) -> dict[int, list[nn.Module]]:
    """Returns the outermost modules that have a parameter, by its id."""
    parents: dict[int, list[nn.Module]] = {}
    owners: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in vars(module).get("_modules", {}).values():
            parents.setdefault(id(child), []).append(module)
        for parameter in vars(module).get("_parameters", {}).values():
            if id(parameter) in wanted:
                owners.setdefault(id(parameter), []).append(module)
    return {key: _outermost(within, parents) for key, within in owners.items()}


def _outermost(modules: list[nn.Module], parents: Mapping[int, list[nn.Module]]) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        around = parents.get(id(module), [])
        waiting += around
        if not around:
            found[id(module)] = module
    return list(found.values())


def _schedules(schedulers: Sequence[Any], optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Returns the state dicts of schedulers of optimizers, by name; not of those that are part of another one."""
    inner = {id(part) for one in schedulers for part in vars(one).get("_schedulers", ())}
    found: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        own = [one for one in schedulers if vars(one).get("optimizer") is optimizer and id(one) not in inner]
        own.sort(key=lambda one: type(one).__name__)  # in the same order in every run
        for number, scheduler in enumerate(own):
            found[name if number == 0 else f"{name} {type(scheduler).__name__}"] = scheduler.state_dict()
    return found


def _numbered(names: Iterable[str]) -> list[str]:
    numbered: list[str] = []
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        numbered.append(name if seen[name] == 1 else f"{name}{seen[name]}")
    return numbered


def _single_or_named(named: dict[str, _Object]) -> Any:
    return next(iter(named.values())) if len(named) == 1 else named
