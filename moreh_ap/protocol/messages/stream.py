"""Commands about the stream of commands: several in one message, and waiting for all before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.protocol.script_code.import_path import AddedFolder


@dataclass(frozen=True)
class Batch:
    """Several commands in one message, executed in order; answers the list of their results."""

    commands: tuple[Any, ...]


@dataclass(frozen=True)
class Again:
    """Execute a command that was skipped after an error, if what it is about is there; it may have been lost too."""

    command: Any


@dataclass(frozen=True)
class ImportModules:
    """Import modules that a model will need: a hint, while the controller is busy with something else.

    Attributes:
        names: The modules.
        environment: Variables that the script has set since, and their values.
        folders: Folders that it imports from since.
        arguments: The script's `sys.argv`; empty: as the workers know it.
    """

    names: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    folders: tuple[AddedFolder, ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class DefineList:
    """Give a list of state tensors a number: later commands name the list by it."""

    list_id: int
    refs: tuple[StateRef, ...]


@dataclass(frozen=True)
class Synchronize:
    """Answer when everything sent before is done."""
