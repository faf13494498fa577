"""Collects the names of torch that Python files use, by `ast`, with the line of each.

    python scripts/torch_uses.py [FILE ...]    # those that a list in tests/torch_names lacks; by default of all files

Looked at are imports, chains of attributes that begin at an import (``dist.all_reduce``), operations of
`torch.ops.aten`, keyword arguments of such calls, texts that are a dotted name (``"torch.nn.parallel"``), an
object followed by the name of an attribute among the arguments of a call (``replace(torch.cuda, "_lazy_init", new)``),
and private attributes of objects whose class is not known. Not looked at are public attributes of such objects, among
them methods of tensors.

A use is guarded where the code goes on without the name: in a `try` that catches its absence, under
`contextlib.suppress`, behind `hasattr` of the same name, and in a `getattr` with a default.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch_names_list import TorchNames, read_list

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "tests" / "torch_names"
_ABSENCE = {"ImportError", "ModuleNotFoundError", "AttributeError"}
_NOT_TORCH = "torch.moreh"

OTHER_LIBRARIES = {"_can_record_outputs": "transformers"}
"""Private attributes of objects of other libraries than torch."""


class Use(NamedTuple):
    """A name that a file needs to exist.

    Attributes:
        line: Line of the file.
        name: Full name; for an attribute of an object of unknown class, a dot and the attribute.
        keywords: Names of keyword arguments with which it is called.
    """

    line: int
    name: str
    keywords: tuple[str, ...] = ()


@functools.cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def uses_of(text: str) -> list[Use]:
    """Returns the uses in the text of a Python file, except for guarded ones."""
    tree = _parsed(text)
    visitor = _Visitor(tree)
    visitor.visit(tree)
    return sorted(set(visitor.uses))


def own_private_names(texts: Sequence[str]) -> frozenset[str]:
    """Returns private names that need not be torch's: files define or set them, or they are another library's."""
    found: set[str] = set()
    for text in texts:
        for node in ast.walk(_parsed(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(name for name in found if name.startswith("_")).union(OTHER_LIBRARIES)


def missing(uses: Sequence[Use], names: TorchNames, own: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Yields line and text for every use that a version of torch has no name for.

    Args:
        uses: The uses of one file.
        names: The names of the version.
        own: Private attributes that are not torch's.
    """
    for use in uses:
        if use.name.startswith("."):
            attribute = use.name[1:]
            if attribute not in own and not names.any_scope_has(attribute):
                yield use.line, f"{attribute}, an attribute of an object"
            continue
        answer = names.look_up(use.name)
        if answer.exists is False:
            yield use.line, use.name
        elif answer.params is not None:
            for keyword in use.keywords:
                if keyword not in answer.params:
                    yield use.line, f"{use.name}({keyword}=)"


class _Visitor(ast.NodeVisitor):
    """Walks through one file, knowing what names mean in each function."""

    def __init__(self, tree: ast.Module) -> None:
        self.uses: list[Use] = []
        self._meanings: list[dict[str, str | None]] = [_bindings(tree, [])]
        self._texts: list[dict[str, tuple[str, ...]]] = []
        self._guarded_names: list[frozenset[str] | None] = []
        """For each guard around the place: the names that it is for, None for all."""

    # -- places ----------------------------------------------------------------------------------------------------

    def _in_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        for part in (*getattr(node, "decorator_list", ()), *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(part)
        self._meanings.append(_bindings(node, self._meanings))
        for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if one.annotation is not None:
                self.visit(one.annotation)
        if getattr(node, "returns", None) is not None:
            self.visit(node.returns)  # type: ignore[union-attr, arg-type]
        for part in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(part)
        self._meanings.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _in_function  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.bases, *node.keywords, *node.decorator_list):
            self.visit(part)
        self._meanings.append(_bindings(node, self._meanings))
        for part in node.body:
            self.visit(part)
        self._meanings.pop()

    def visit_Try(self, node: ast.Try) -> None:
        caught = {name for handler in node.handlers for name in _caught(handler)}
        self._visit_guarded(node.body, None if caught & _ABSENCE else frozenset())
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def visit_With(self, node: ast.With) -> None:
        names = {ast.unparse(one) for item in node.items if isinstance(item.context_expr, ast.Call)
                 and ast.unparse(item.context_expr.func).endswith("suppress")
                 for one in item.context_expr.args}  # fmt: skip
        for item in node.items:
            self.visit(item)
        self._visit_guarded(node.body, None if names & _ABSENCE else frozenset())

    def _in_condition(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        asked = frozenset(_asked_for(node.test))
        self._visit_guarded(node.body if isinstance(node.body, list) else [node.body], asked)
        self._visit_guarded(node.orelse if isinstance(node.orelse, list) else [node.orelse], asked)

    visit_If = visit_IfExp = _in_condition  # type: ignore[assignment]

    def _visit_guarded(self, body: Sequence[ast.AST], names: frozenset[str] | None) -> None:
        self._guarded_names.append(names)
        for part in body:
            self.visit(part)
        self._guarded_names.pop()

    def visit_For(self, node: ast.For) -> None:
        """In ``for name in ("a", "b")``, remembers what the name can be."""
        listed = node.iter.elts if isinstance(node.iter, (ast.Tuple, ast.List)) else []
        texts = tuple(one.value for one in listed if isinstance(one, ast.Constant) and isinstance(one.value, str))
        self._texts.append({node.target.id: texts} if isinstance(node.target, ast.Name) else {})
        self.generic_visit(node)
        self._texts.pop()

    # -- uses ------------------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node.lineno, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level:
            for alias in node.names:
                self._add(node.lineno, f"{node.module}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._meaning(node)
        if name is not None:
            self._add(node.lineno, name)
            return
        if node.attr.startswith("_") and not node.attr.startswith("__") and isinstance(node.ctx, ast.Load):
            root = node.value
            while isinstance(root, (ast.Attribute, ast.Call, ast.Subscript)):
                root = root.func if isinstance(root, ast.Call) else root.value
            of_import = isinstance(root, ast.Name) and self._bound(root.id) == "?"
            if not of_import and not self._is_guarded(node.attr):
                self.uses.append(Use(node.lineno, f".{node.attr}"))
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._meaning(node.func)
        if called is not None:
            keywords = tuple(sorted(one.arg for one in node.keywords if one.arg))
            self._add(node.lineno, called, keywords)
        else:
            self.visit(node.func)
        has_default = isinstance(node.func, ast.Name) and (node.func.id, len(node.args)) in {
            ("getattr", 3), ("hasattr", 2), ("setattr", 3)}  # fmt: skip
        for holder, attribute in zip(node.args, node.args[1:]):
            name = self._meaning(holder)
            if name is not None and not has_default:
                for text in self._possible_texts(attribute):
                    if text.isidentifier():
                        self._add(attribute.lineno, f"{name}.{text}")
        for part in (*node.args, *(one.value for one in node.keywords)):
            self.visit(part)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and re.fullmatch(r"torch(\.\w+)+", node.value):
            self._add(node.lineno, node.value)

    def _possible_texts(self, node: ast.expr) -> tuple[str, ...]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return (node.value,)
        if isinstance(node, ast.Name):
            return next((texts[node.id] for texts in reversed(self._texts) if node.id in texts), ())
        return ()

    def _add(self, line: int, name: str, keywords: tuple[str, ...] = ()) -> None:
        if not (name == "torch" or name.startswith("torch.")) or f"{name}.".startswith(f"{_NOT_TORCH}."):
            return
        if not self._is_guarded(*name.split(".")):
            self.uses.append(Use(line, name, keywords))

    def _is_guarded(self, *parts: str) -> bool:
        return any(names is None or names & set(parts) for names in self._guarded_names)

    def _bound(self, name: str) -> str | None:
        """Returns what a name stands for: a name of torch, "?" for an import from elsewhere, None for anything else."""
        return next((scope[name] for scope in reversed(self._meanings) if name in scope), None)

    def _meaning(self, node: ast.expr) -> str | None:
        return _meaning(node, self._meanings)


def _meaning(node: ast.expr, meanings: Sequence[dict[str, str | None]]) -> str | None:
    """Returns the full name in torch of a chain of attributes; None if it does not begin at torch."""
    if isinstance(node, ast.Name):
        found = next((scope[node.id] for scope in reversed(meanings) if node.id in scope), None)
        return None if found == "?" else found
    if isinstance(node, ast.Attribute) and (holder := _meaning(node.value, meanings)):
        return f"{holder}.{node.attr}"
    return None


def _bindings(scope: ast.AST, outer: Sequence[dict[str, str | None]]) -> dict[str, str | None]:
    """Returns what the names that a module, class or function binds stand for, as `_Visitor._bound` says it."""
    found: dict[str, str | None] = {}
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        given = scope.args
        every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        found = {one.arg: None for one in every if one is not None}
    body = scope.body if isinstance(scope.body, list) else [scope.body]  # type: ignore[attr-defined]
    assigned: dict[str, list[ast.expr | None]] = {}
    todo: deque[ast.AST] = deque(body)
    while todo:
        node = todo.popleft()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = None
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                found[alias.asname or name] = name if name.split(".")[0] == "torch" else "?"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                in_torch = not node.level and (node.module or "").split(".")[0] == "torch"
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}" if in_torch else "?"
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
            todo.append(node.value)
            continue
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned.setdefault(node.id, []).append(None)
        todo.extend(ast.iter_child_nodes(node))
    for name, values in assigned.items():
        value = values[0] if len(values) == 1 else None
        is_chain = isinstance(value, ast.Attribute)
        found[name] = _meaning(value, [*outer, found]) if value is not None and is_chain else None
    return found


def _caught(handler: ast.ExceptHandler) -> Iterator[str]:
    if handler.type is None:
        yield "Exception"
    else:
        for node in handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]:
            yield ast.unparse(node)


def _asked_for(test: ast.expr) -> Iterator[str]:
    """Yields the names that a condition asks for with `hasattr`."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr":
            yield ast.unparse(node.args[-1]).strip("'")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="Python files; by default all of moreh_ap and moreh")
    files = parser.parse_args().files or package_files()
    texts = [path.read_text(encoding="utf-8") for path in files]
    own = own_private_names(texts)
    found = 0
    for listed in sorted(LISTS.glob("*.txt.gz")):
        names = TorchNames(read_list(listed))
        for path, text in zip(files, texts):
            for line, name in missing(uses_of(text), names, own):
                print(f"{path}:{line}: torch {listed.name.removesuffix('.txt.gz')} has no {name}")
                found += 1
    return found > 0


def package_files() -> list[Path]:
    """Returns every source file of the package, without the table of private names, which uses none of them."""
    files = {path for package in ("moreh_ap", "moreh") for path in (ROOT / package).rglob("*.py")}
    return sorted(files - {ROOT / "moreh_ap" / "private_names.py"})


if __name__ == "__main__":
    sys.exit(main())
