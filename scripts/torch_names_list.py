"""A list of the names of one version of torch: how it is kept in a file, and whether a name is in it.

Decides the format of the file and how a dotted name is looked up. Must not know where the names come from.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["value", "function", "class", "alias", "instance"]
_SIGNS: dict[str, Kind] = {"=": "alias", "(": "function", ":": "class", "~": "instance"}


class Entry(NamedTuple):
    """One name of a module or class.

    Attributes:
        kind: What the name is; a value may be anything.
        target: Full name of what an alias stands for, or of an instance's class; names of a function's parameters,
            ``**`` where it takes any.
    """

    kind: Kind
    target: str = ""

    @property
    def params(self) -> list[str]:
        """Names of a function's parameters."""
        return self.target.split(",") if self.target else []


@dataclass
class Scope:
    """The names of a module or class, and the classes from which it has others; "?" is a base outside of torch."""

    bases: list[str] = field(default_factory=list)
    names: dict[str, Entry] = field(default_factory=dict)


class Answer(NamedTuple):
    """Whether a name exists.

    Attributes:
        exists: None where the list cannot tell: attributes of values, of classes with bases outside of torch.
        params: Names of the parameters that it can be called with; None where they are not known, or any will do.
    """

    exists: bool | None
    params: frozenset[str] | None = None


def write_list(path: Path, scopes: Mapping[str, Scope], title: str) -> None:
    """Writes a compressed text: a line for each module or class, and below it a line with a tab for each name."""
    lines = [f"# {title}; written by scripts/torch_names.py"]
    signs = {kind: sign for sign, kind in _SIGNS.items()}
    for name, scope in sorted(scopes.items()):
        lines.append(" ".join([name, *scope.bases]))
        lines += [f"\t{one}{signs.get(entry.kind, '')}{entry.target}" for one, entry in sorted(scope.names.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(lines).encode(), 9, mtime=0))


def read_list(path: Path) -> dict[str, Scope]:
    """Returns what `write_list` wrote."""
    scopes: dict[str, Scope] = {}
    scope = Scope()
    for line in gzip.decompress(path.read_bytes()).decode().splitlines()[1:]:
        if not line.startswith("\t"):
            name, *bases = line.split(" ")
            scope = scopes[name] = Scope(bases)
            continue
        end = next((index for index, sign in enumerate(line) if sign in _SIGNS), len(line))
        scope.names[line[1:end]] = Entry(_SIGNS[line[end]], line[end + 1 :]) if line[end:] else Entry("value")
    return scopes


class TorchNames:
    """Looks names up.

    Args:
        scopes: The modules and classes by their dotted names.
    """

    def __init__(self, scopes: Mapping[str, Scope]) -> None:
        self._scopes = scopes

    def has_module(self, name: str) -> bool:
        """Returns whether ``import name`` would find a module."""
        return name in self._scopes

    def any_scope_has(self, name: str) -> bool:
        """Returns whether any module or class has an attribute of this name."""
        return any(name in scope.names for scope in self._scopes.values())

    def look_up(self, dotted: str) -> Answer:
        """Returns whether a chain of attributes such as ``torch.nn.functional.linear`` exists."""
        scope, rest = self._longest_scope(dotted)
        followed: set[tuple[str, str]] = set()
        while rest:
            name = rest.pop(0)
            holder, entry = self._member(scope, name)
            module = f"{scope}.{name}"
            if entry is None and module in self._scopes:
                scope = module
            elif entry is None:
                return Answer(False if holder else None)
            elif entry.kind == "alias" or (entry.kind == "instance" and rest):
                if (scope, name) in followed:  # two modules that import a name from each other
                    return Answer(None)
                followed.add((scope, name))
                scope, above = self._longest_scope(entry.target)
                rest = above + rest
            elif entry.kind == "class":
                scope = f"{holder}.{name}"
            else:
                is_known = entry.kind == "function" and not rest
                return Answer(None if rest else True, _accepted(entry) if is_known else None)
        return Answer(True, self._constructor(scope))

    def _longest_scope(self, dotted: str) -> tuple[str, list[str]]:
        """Returns the module or class with which a dotted name begins, the longest there is, and what follows."""
        parts = dotted.split(".")
        for end in range(len(parts), 1, -1):
            if ".".join(parts[:end]) in self._scopes:
                return ".".join(parts[:end]), parts[end:]
        return parts[0], parts[1:]

    def _member(self, scope: str, name: str) -> tuple[str | None, Entry | None]:
        """Returns the scope that has the name and what it is; no scope where a base cannot be looked into."""
        todo, is_known = [scope], True
        done: set[str] = set()
        while todo:
            real = self._real(todo.pop(0))
            if real is None:
                is_known = False
            elif real not in done:
                done.add(real)
                inside = self._scopes[real]
                if name in inside.names:
                    return real, inside.names[name]
                if inside.bases and "__getattr__" in inside.names:
                    is_known = False
                todo += inside.bases
        return (scope if is_known else None), None

    def _real(self, name: str) -> str | None:
        """Returns the name under which a class is kept, of which this name may be an alias."""
        seen: set[str] = set()
        while name not in self._scopes:
            holder, _, last = name.rpartition(".")
            real = self._real(holder) if holder else None
            entry = self._scopes[real].names.get(last) if real is not None else None
            if name in seen or entry is None or entry.kind != "alias":
                return None
            seen.add(name)
            name = entry.target
        return name

    def _constructor(self, scope: str) -> frozenset[str] | None:
        _, entry = self._member(scope, "__init__")
        return _accepted(entry) if entry is not None and entry.kind == "function" else None


def _accepted(entry: Entry) -> frozenset[str] | None:
    return None if "**" in entry.params else frozenset(entry.params)
