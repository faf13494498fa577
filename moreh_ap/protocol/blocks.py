"""The blocks of a model: the lists of equal modules that its body repeats.

Decides what counts as a block. Must not know plans, devices or what is done with blocks.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes that PyTorch itself keeps in a module."""


class ModelGroup(nn.ModuleList):
    """Several models that have parameters in common, as one model of which the members are called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Is not called: FSDP2 wants a container to have one."""
        raise NotImplementedError("a group of models is called by its members")


def block_lists(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Returns the outermost lists (ModuleList, Sequential) of modules of one class, by path.

    A list of modules without submodules (one Linear each) is none: its members are too small to be handled alone.
    """
    lists: dict[str, list[nn.Module]] = {}
    _collect(module, "", lists)
    return lists


def _collect(module: nn.Module, prefix: str, lists: dict[str, list[nn.Module]]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and _is_repetition(child):
            lists[path] = list(child)
        else:
            _collect(child, f"{path}.", lists)


def _is_repetition(blocks: nn.ModuleList | nn.Sequential) -> bool:
    members = list(blocks)
    if isinstance(blocks, nn.Sequential) and len(members) < 2:
        return False
    if any(member is None for member in members):
        return False
    return len({type(b) for b in members}) == 1 and all(
        next(b.children(), None) is not None and next(iter(b.parameters()), None) is not None for b in members
    )


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks of all lists that own their parameters and are called: a list or dict of layers is not.

    A member that shares a parameter with the rest of the model (tied weights) has to go with it: it is left out.
    """
    blocks: list[nn.Module] = []
    for members in block_lists(module).values():
        blocks.extend(block for block in members if block not in blocks)
    uses = Counter(id(p) for sub in module.modules() for p in sub._parameters.values() if p is not None)
    called = [block for block in blocks if type(block).forward is not nn.Module.forward]
    return [block for block in called if _owns_its_parameters(block, uses)]


def _owns_its_parameters(block: nn.Module, uses: Counter[int]) -> bool:
    inside = Counter(id(p) for sub in block.modules() for p in sub._parameters.values() if p is not None)
    return all(uses[key] == count for key, count in inside.items())


def module_that_renames(module: nn.Module) -> nn.Module | None:
    """Returns a module whose parameters have names of its own: with dots, or from a `named_parameters` that does not
    take PyTorch's arguments. TensorDict keeps parameters of stacked networks so."""
    for submodule in module.modules():
        if any("." in name for name in submodule._parameters):
            return submodule
        if getattr(submodule.named_parameters, "__func__", None) is nn.Module.named_parameters:
            continue
        if not _names_duplicates(submodule):
            return submodule
    return None


def parameters_with_all_names(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields parameters under each of their names, or once where the module's own `named_parameters` does only that."""
    return module.named_parameters(remove_duplicate=False) if _names_duplicates(module) else module.named_parameters()


def _names_duplicates(module: nn.Module) -> bool:
    taken = inspect.signature(module.named_parameters).parameters
    return "remove_duplicate" in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())


def modules_aside(module: nn.Module) -> list[nn.Module]:
    """Returns modules that PyTorch does not count among those of `module`, and that have parameters of it.

    They are in lists or dicts of Python among its attributes, and their parameters in an `nn.ParameterList` beside.
    """
    known, own = set(map(id, module.modules())), set(map(id, module.parameters()))
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()

    def look(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            for submodule in value.modules():
                if id(submodule) not in known and any(
                    id(parameter) in own for parameter in submodule._parameters.values()
                ):
                    found[id(submodule)] = submodule
            return
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, (nn.Module, dict, list, tuple)):
                look(item)

    for submodule in module.modules():
        for name, value in vars(submodule).items():
            if name not in OF_EVERY_MODULE and isinstance(value, (dict, list, tuple)):
                look(value)
    return list(found.values())
