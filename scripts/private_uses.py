"""Collects the private names of other libraries that the package uses, by `ast`, with the file and line of each.

    python scripts/private_uses.py            # prints them
    python scripts/private_uses.py --write    # writes the folders in the table, and prints what it lacks

Looked at are imports, chains of attributes that begin at an import (``torch._C._swap_tensor_impl``), texts that are a
dotted name of a library, an object followed by the name of an attribute among the arguments of a call
(``replace(torch.cuda, "_lazy_init", new)``), private attributes of objects that the package does not define itself, and
private methods that a class overrides.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "moreh_ap" / "private_names.py"
DOCUMENTED = ("os._exit", "sys._getframe")
"""Names that begin with an underscore and are in the manual of Python."""
MOST_FOLDERS = 5
"""More are written as "*"."""
LIBRARIES = ("torch", "transformers", "monarch", "safetensors", "accelerate", "peft", "diffusers", "trl", "datasets")
_OWNERS = ("torch.Tensor", "torch.nn.Module", "torch.optim.Optimizer", "torch.UntypedStorage", "torch._ops.OpOverload")
"""Classes whose private attributes are the library's though the package has attributes of its own by the same name."""


class Use(NamedTuple):
    """A private name in a file; of an object of unknown class a dot and the attribute."""

    file: str
    line: int
    name: str


def is_private(part: str) -> bool:
    """Whether a part of a dotted name is private: one underscore in front, and more than that."""
    return bool(re.match(r"_[^_]", part))


def uses(root: Path = ROOT) -> list[Use]:
    """Returns every use in the package's files."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((root / "moreh_ap").rglob("*.py"))}
    trees.pop(root / "moreh_ap" / "private_names.py", None)
    own = frozenset().union(*map(_defined, trees.values()))
    librarys = {name for owner in _OWNERS for name in attributes_of(find(owner)) if is_private(name)}
    found = [
        Use(str(path.relative_to(root)), line, name)
        for path, tree in trees.items()
        for line, name in _of_file(tree, own, librarys)
    ]
    return sorted(set(found))


def _of_file(tree: ast.Module, own: frozenset[str], librarys: set[str]) -> Iterator[tuple[int, str]]:
    bound = _imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                if _is_foreign(name):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute):
            name = _chain(node, bound)
            if name is not None and _is_foreign(name):
                yield from ((node.lineno, name) for name in _shortened(name))
            elif name is None and is_private(node.attr):
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if node.attr not in own or (node.attr in librarys and not is_own):
                    yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in librarys and node.value not in own:
                yield node.lineno, f".{node.value}"
            if re.fullmatch(rf"({'|'.join(LIBRARIES)})(\.\w+)+", node.value) and _is_foreign(node.value):
                yield node.lineno, node.value
        elif isinstance(node, ast.Call):
            for holder, attribute in zip(node.args, node.args[1:]):
                if isinstance(attribute, ast.Constant) and is_private(str(attribute.value)):
                    name = _chain(holder, bound) if isinstance(holder, (ast.Attribute, ast.Name)) else None
                    if name is not None:
                        yield node.lineno, f"{name}.{attribute.value}"
                    elif str(attribute.value) not in own and str(attribute.value).isidentifier():
                        yield node.lineno, f".{attribute.value}"
        elif isinstance(node, ast.ClassDef):
            for base in filter(None, (_chain(base, bound) for base in node.bases)):
                theirs = attributes_of(find(base)) if base.split(".")[0] in LIBRARIES else ()
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and is_private(method.name) and method.name in theirs:
                        yield method.lineno, f"{base}.{method.name}"


def _is_foreign(name: str) -> bool:
    parts = name.split(".")
    return parts[0] not in ("moreh_ap", "moreh") and name not in DOCUMENTED and any(map(is_private, parts))


def _imports(tree: ast.Module) -> dict[str, str]:
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            bound.update((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
    return {name: full for name, full in bound.items() if full.split(".")[0] not in ("moreh_ap", "moreh")}


def _chain(node: ast.expr, bound: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute) and (holder := _chain(node.value, bound)):
        return f"{holder}.{node.attr}"
    return None


def _defined(tree: ast.Module) -> frozenset[str]:
    """Returns the names that a file defines or sets."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and (node.attr.startswith("_moreh") or _is_set_by_self(node)):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and _sets_on_object(node.func):
            found.update(arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant))
    return frozenset(found)


def _sets_on_object(func: ast.expr) -> bool:
    return isinstance(func, ast.Attribute) and func.attr == "__setattr__" and ast.unparse(func.value) == "object"


def _is_set_by_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


# -- what is installed -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _same_environment() -> Iterator[None]:
    """Takes back what an import adds to the environment: the engine's adds a variable, which processes inherit."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


def find(name: str) -> Any:
    """Returns the module, class or value of a dotted name.

    Raises:
        AttributeError: The installed library has none such.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            with _same_environment():
                found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part) and part in attributes_of(found):
                return None  # an attribute that objects of the class get when they are made
            found = getattr(found, part)
        return found
    raise AttributeError(f"there is no module {parts[0]}")


def _shortened(name: str) -> Iterator[str]:
    """Yields a chain up to its first private object that is no module; a module alone is part of a longer chain."""
    parts = name.split(".")
    for length in range(2, len(parts) + 1):
        if any(map(is_private, parts[:length])):
            try:
                found = find(".".join(parts[:length]))
            except AttributeError:
                found = None
            if not inspect.ismodule(found):
                yield ".".join(parts[:length])
                return


@functools.cache
def attributes_of(cls: Any) -> frozenset[str]:
    """Returns the attributes of a class, and those that its code sets on its objects."""
    found = set(dir(cls))
    for part in getattr(cls, "__mro__", ()):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return frozenset(found)


def folders(found: Sequence[Use]) -> dict[str, list[str]]:
    """Returns for each name the folders of the files that use it."""
    result: dict[str, set[str]] = {}
    for use in found:
        result.setdefault(use.name, set()).add(str(Path(use.file).parent.relative_to("moreh_ap")))
    return {name: sorted(where) for name, where in sorted(result.items())}


def write(found: dict[str, list[str]]) -> list[str]:
    """Writes the folders of every row of the table anew, and returns names that have no row, and rows without a use."""
    text = TABLE.read_text(encoding="utf-8")
    row = re.compile(r'\(\s*"([\w.]+\.\w+)",\s*"([\w/.* ]+)",?\s*\)')
    rows = {match[1]: sorted({folder for name in found if means(name, match[1]) for folder in found[name]})
            for match in row.finditer(text)}  # fmt: skip

    def with_folders(match: re.Match[str]) -> str:
        where = rows[match[1]]
        return f'("{match[1]}", "{"*" if len(where) > MOST_FOLDERS else " ".join(where)}")'

    TABLE.write_text(row.sub(with_folders, text), encoding="utf-8")
    no_row = [f"no row for {name}" for name in found if not any(means(name, full) for full in rows)]
    return no_row + [f"no use of {name}" for name, where in rows.items() if not where]


def means(use: str, name: str) -> bool:
    """Whether a use may be of a name: an attribute of an object of unknown class is any of its name."""
    return use == name or (use.startswith(".") and name.endswith(use))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the folders of the table; name what it lacks")
    found = folders(uses())
    lines = write(found) if parser.parse_args().write else [f"{name} {' '.join(found[name])}" for name in found]
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
