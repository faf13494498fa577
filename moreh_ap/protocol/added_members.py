"""What a forward adds to the modules of a model: submodules, parameters, buffers, and hooks of the script.

Decides what counts as added, and takes it back. Must not know why a forward ran, or what follows. What libraries hook
into modules in their first forward is part of the model: it stays.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from moreh_ap.protocol.module_attributes import LIBRARIES, full_name

_HELD = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Contents = dict[str, dict[Any, Any]]
"""The members of a module, by kind: submodules, parameters, buffers and hooks."""


class Members:
    """The present members of a model's modules.

    Args:
        root: The model, with all its parts.
    """

    def __init__(self, root: nn.Module) -> None:
        self._held: list[tuple[str, nn.Module, Contents]] = [
            (path, module, {kind: dict(vars(module)[kind]) for kind in (*_HELD, *_HOOKS)})
            for path, module in root.named_modules()
        ]

    def added(self) -> tuple[str, ...]:
        """Returns what the modules hold and did not: the paths of members, and on which modules there are hooks."""
        names: list[str] = []
        for path, module, before in self._held:
            names += [full_name(path, name) for kind in _HELD for name in _new_members(module, kind, before)]
            names += [f"a hook on {path or 'the model'}" for kind in _HOOKS if _new_hooks(module, kind, before)]
        return tuple(names)

    def take_back(self) -> None:
        """Has the modules hold nothing that was added."""
        for _, module, before in self._held:
            for kind in _HELD:
                held = vars(module)[kind]
                for name in _new_members(module, kind, before):
                    del held[name]
                    if name in before[kind]:
                        held[name] = before[kind][name]
            for kind in _HOOKS:
                for key in _new_hooks(module, kind, before):
                    del vars(module)[kind][key]


def is_of_library(hook: Any) -> bool:
    """Returns whether a library registered the hook, as a part of the model."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return str(origin).split(".")[0] in LIBRARIES


def _new_members(module: nn.Module, kind: str, before: Contents) -> list[str]:
    """Returns names that nothing had, and of submodules those that others had: a forward may replace tensors."""
    held, had = vars(module)[kind], before[kind]
    if held.keys() == had.keys() and all(had[name] is held[name] for name in held):
        return []
    is_kept = kind != "_modules"
    return [
        name
        for name, member in held.items()
        if member is not None and had.get(name) is not member and not (is_kept and had.get(name) is not None)
    ]


def _new_hooks(module: nn.Module, kind: str, before: Contents) -> list[int]:
    held, had = vars(module)[kind], before[kind]
    return [key for key, hook in held.items() if key not in had and not is_of_library(hook)] if held else []
