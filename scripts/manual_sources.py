"""Reads scripts as text: their lines of code, the difference of two, and the concepts that their names stand for.

Decides what counts as a line and as a name. Must not know which scripts are compared.
"""

from __future__ import annotations

import ast
import difflib
import functools
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

from manual_counterparts import CONCEPTS, METHODS, VARIABLES

PACKAGES = ("torch.distributed", "torch.nn.parallel", "deepspeed")  # every name of theirs needs a row in CONCEPTS


class UnknownName(LookupError):
    """A script uses a name of `PACKAGES` that has no concept."""


def body_of(source: str) -> list[str]:
    """Returns the lines of a script after the text that opens it, without the marks of what pages show of it."""
    first = ast.parse(source).body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    lines = source.splitlines()
    lines = lines[first.end_lineno :] if is_text and first.end_lineno else lines
    return [line for line in lines if "--8<--" not in line]


def code_of(source: str) -> list[str]:
    """Returns the lines of code: no docstrings, no comments, nothing blank."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    texts = [node for node in nodes if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    without = {number for node in texts for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = {number: line for number, line in enumerate(source.splitlines(), start=1) if number not in without}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.start[0] in lines:
            lines[token.start[0]] = lines[token.start[0]][: token.start[1]]
    return [line.rstrip() for line in lines.values() if line.strip()]


@functools.cache
def changed_lines(before: str, after: str) -> tuple[int, int]:
    """Returns how many lines of code were added, and how many removed.

    >>> changed_lines("a = 1\\nb = 2\\n", "a = 1  # one\\nb = 3\\n\\nc = 4\\n")
    (2, 1)
    """
    changes = list(difflib.ndiff(code_of(before), code_of(after)))
    return tuple(sum(line.startswith(sign) for line in changes) for sign in ("+ ", "- "))


def difference(before: str, after: str, num_lines: int = 2) -> str:
    """Returns the unified difference of two scripts, without the texts that open them and without line numbers."""
    lines = list(difflib.unified_diff(body_of(before), body_of(after), n=num_lines, lineterm=""))[2:]
    return "\n".join("@@" if line.startswith("@@") else line for line in lines)


def borrowed(path: Path) -> dict[Path, list[str]]:
    """Returns the definitions that a script imports from other `train_*.py` beside it, and what those need there.

    Each is the text of a function, class or assignment.
    """
    found: dict[Path, list[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("train_"):
            file = path.with_name(f"{node.module}.py")
            found[file] = _definitions(file.read_text(), frozenset(alias.name for alias in node.names))
    return found


@functools.cache
def _definitions(source: str, names: frozenset[str]) -> list[str]:
    """Returns the text of the definitions of `names` at a module's top, and of those that they use."""
    tree, needed = ast.parse(source), set(names)
    while True:
        nodes = [node for node in tree.body if _defined(node) & needed]
        used = {name.id for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name)}
        if used <= needed:
            return [ast.get_source_segment(source, node) or "" for node in nodes]
        needed |= used


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def concepts_of(path: Path) -> list[str]:
    """Returns what a reader of a script has to know, as the tables call it and in their order, each once.

    Raises:
        UnknownName: A name of `PACKAGES` has no row.
    """
    used = set(_names_in(path.read_text()))
    for file, definitions in borrowed(path).items():
        for definition in definitions:
            used |= _names_in(definition, file.read_text())
    known = {**VARIABLES, **CONCEPTS, **METHODS}
    if unknown := sorted(used - set(known)):
        raise UnknownName(
            f"{path.name} uses {', '.join(unknown)}, without a concept in scripts/manual_counterparts.py\n"
            f"every name of {', '.join(PACKAGES)} needs a row in CONCEPTS\n"
            f'write for example: "{unknown[0]}": "{next(iter(CONCEPTS.values()))}",'
        )
    return list(dict.fromkeys(concept for name, concept in known.items() if name in used))


def _imports(tree: ast.Module) -> dict[str, str]:
    """Returns the full names of what a module imports at its top, by the names it uses for them."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def _names_in(source: str, around: str = "") -> frozenset[str]:
    """Returns the full names of `PACKAGES`, the methods and the variables of the environment that code uses.

    Args:
        source: The code.
        around: The module that it is from, whose imports count too.
    """
    tree = ast.parse(source)
    return frozenset(_names(tree, {**_imports(ast.parse(around)), **_imports(tree)}))


def _names(tree: ast.Module, imports: Mapping[str, str]) -> Iterator[str]:
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
            name = _full_name(node, imports)
            if any(name.startswith(f"{package}.") for package in PACKAGES):
                yield name
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield node.attr
        if isinstance(node, ast.Subscript) and _full_name(node.value, imports) == "os.environ":
            yield from (part.value for part in ast.walk(node.slice) if isinstance(part, ast.Constant))


def _full_name(node: ast.expr, imports: Mapping[str, str]) -> str:
    """Returns the dotted name of an expression with the import in front put in full; "" for other expressions."""
    written = ast.unparse(node)
    for prefix in sorted(imports, key=len, reverse=True):
        if written == prefix or written.startswith(f"{prefix}."):
            return imports[prefix] + written[len(prefix) :]
    return ""
