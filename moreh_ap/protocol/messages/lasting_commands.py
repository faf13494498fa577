"""The commands that make what snapshots do not have: models under their plans, optimizers without their states.

Decides which of the commands that workers were told have to be told again before a snapshot is restored. Must not know
when snapshots are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moreh_ap.protocol.messages.models import (
    BuildModel,
    ChangeModule,
    ReleaseModel,
    SetKernelFormats,
    SetRequiresGrad,
    UseCompiledBlocks,
)
from moreh_ap.protocol.messages.optimizers import BuildOptimizer, ReleaseOptimizer
from moreh_ap.protocol.messages.stream import ImportModules

_LASTING = (
    BuildOptimizer,
    ChangeModule,
    ImportModules,
    SetKernelFormats,
    SetRequiresGrad,
    UseCompiledBlocks,
)


MADE_AND_SET = (*_LASTING, BuildModel, ReleaseModel, ReleaseOptimizer)
"""Commands that a `Structure` records."""


class Structure:
    """The commands that made and set the present models and optimizers, oldest first.

    Commands about what the script has dropped or set anew since are left out.
    """

    def __init__(self) -> None:
        self._commands: list[Any] = []
        self._released: set[str] = set()  # models that optimizers still have parameters of

    def commands(self) -> tuple[Any, ...]:
        """Returns the commands."""
        return (*self._commands, *map(ReleaseModel, sorted(self._released)))

    def change(self, change: Callable[[Any], Any]) -> None:
        """Replaces each command by what `change` makes of it."""
        self._commands = [change(command) for command in self._commands]

    def add(self, commands: Sequence[Any]) -> None:
        """Records the commands that the workers have executed next."""
        for command in commands:
            kind = type(command)
            if kind in (ReleaseModel, ReleaseOptimizer):
                self._release(command.owner)
            elif kind is ChangeModule:
                self._supersede(command, {change[:2] for change in command.changes})
                self._commands.append(command)
            elif kind in (SetRequiresGrad, SetKernelFormats, UseCompiledBlocks):
                self._replace(command)
            elif kind is BuildModel:  # a copy has the values
                self._commands.append(replace(command, sources=dict.fromkeys(command.sources, ())))
            elif kind in _LASTING:
                self._commands.append(command)

    def _release(self, owner: str) -> None:
        """Drops what is about a model or an optimizer; about a model not before the optimizers of its parameters."""
        self._released.add(owner)
        needed = {
            ref.owner
            for one in self._commands
            if type(one) is BuildOptimizer and one.owner not in self._released
            for group in one.groups
            for ref in group
        }
        dropped = self._released - needed
        self._released &= needed
        self._commands = [one for one in self._commands if getattr(one, "owner", None) not in dropped]

    def _supersede(self, command: ChangeModule, names: set[tuple[str, str]]) -> None:
        """Drops changes of attributes that `command` changes again."""
        kept = []
        for one in self._commands:
            if type(one) is ChangeModule and one.owner == command.owner:
                changes = tuple(change for change in one.changes if change[:2] not in names)
                if changes:
                    kept.append(replace(one, changes=changes))
            else:
                kept.append(one)
        self._commands = kept

    def _replace(self, command: Any) -> None:
        """Joins a command with the last one of its kind about the same model."""
        for index, one in enumerate(self._commands):
            if type(one) is type(command) and one.owner == command.owner:
                del self._commands[index]
                if isinstance(command, SetRequiresGrad):
                    command = replace(command, requires_grad={**one.requires_grad, **command.requires_grad})
                elif isinstance(command, SetKernelFormats):
                    command = replace(command, formats={**one.formats, **command.formats})
                break
        self._commands.append(command)
