"""Writes which names a version of torch has, read by `ast` from a wheel that is never installed.

    pip download torch==2.11.0 --no-deps --python-version 3.12 --only-binary=:all: \\
        --platform manylinux_2_28_x86_64 -d FOLDER
    python scripts/torch_names.py FOLDER/torch-2.11.0-*.whl      # writes tests/torch_names/2.11.txt.gz

The list has the public and private names of modules and classes and the parameters of functions; names made in C++ come
from the stubs (.pyi) and from the list of native functions in the wheel. `torch_names_list.py` reads the list and
answers whether a name is in it; `torch_uses.py` collects the names that this package uses.

Decides which names a source file defines. Must not import torch.
"""

from __future__ import annotations

import argparse
import ast
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch_names_list import Entry, Scope, write_list

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "torch_names"

LEFT_OUT = re.compile(
    r"torch\.(testing\._internal|_VF|_decomp|_dynamo\.(?!config|decorators|eval_frame|external_utils)|_export\."
    r"|_functorch\.(_aot|aot_|partitioners)|_higher_order_ops|_inductor|_lazy|_meta_registrations|_numpy|_prims|_refs"
    r"|_strobelight|_subclasses\.(complex_|fake_impls)|_vendor|ao|backends\._nnapi|contrib|distributed\.(_local_tensor"
    r"|_shard|_tools|algorithms|benchmarks|elastic|examples|flight_recorder|launcher|rpc)|fx\.(experimental|passes)"
    r"|nn\.(intrinsic|qat|quantizable|quantized)|onnx\.(_internal|symbolic_)|package|quantization|sparse\._triton"
    r"|utils\.(_sympy|benchmark|cpp_extension|data\.datapipes|model_dump|tensorboard|viz))"
)
"""Modules left out of the list: compilers, quantization, benchmarks and others that a training library has no use for.
An import of one of them is reported as a name that the list lacks."""

_STAR = "*"


def read_wheel(path: Path) -> dict[str, Scope]:
    """Returns the modules and classes of a wheel by their dotted names."""
    with zipfile.ZipFile(path) as wheel:
        files = [name for name in wheel.namelist() if name.startswith("torch/") and name.endswith((".py", ".pyi"))]
        scopes = read_sources((name, wheel.read(name)) for name in files)
        native = wheel.read("torchgen/packaged/ATen/native/native_functions.yaml").decode()
        overrides = wheel.read("torch/overrides.py")
    add_native_functions(scopes, native)
    for node in ast.walk(ast.parse(overrides)):  # it lists methods of tensors, some of which no stub has
        if isinstance(node, ast.Attribute) and _dotted(node.value) == "Tensor":
            scopes["torch._tensor.Tensor"].names.setdefault(node.attr, Entry("value"))
    kept = {name: scope for name, scope in scopes.items() if not LEFT_OUT.match(name)}
    for scope in kept.values():
        for name, entry in scope.names.items():
            if entry.kind in ("alias", "instance") and LEFT_OUT.match(entry.target):
                scope.names[name] = Entry("value")
    return kept


def read_sources(files: Iterable[tuple[str, bytes | str]]) -> dict[str, Scope]:
    """Returns the modules and classes that source files define.

    Args:
        files: Path inside the folder of packages (``torch/nn/functional.py``) and text of every file. A stub and the
            source beside it are one module.
    """
    scopes: dict[str, Scope] = {}
    readers = []
    for path, text in files:
        parts = path.rsplit(".", 1)[0].split("/")
        is_package = parts[-1] == "__init__"
        reader = _Reader(".".join(parts[:-1] if is_package else parts), is_package, path.endswith(".pyi"), scopes)
        reader.read(ast.parse(text))
        readers.append(reader)
    stars = {module: [one for reader in readers if reader.module == module for one in reader.stars]
             for module in {reader.module for reader in readers}}  # fmt: skip
    exported = {reader.module: reader.exported for reader in readers if reader.exported is not None}
    for module in stars:
        _resolve_stars(module, scopes, stars, exported)
    _add_names_of_torch_itself(scopes)
    return scopes


def add_native_functions(scopes: dict[str, Scope], text: str) -> None:
    """Adds `torch.ops.aten` with every operation and its overloads, from the text of native_functions.yaml.

    Other namespaces of `torch.ops` are made in C++ alone, so that the list cannot tell what they have.
    """
    scopes["torch"].names["ops"] = Entry("class")
    scopes["torch.ops"] = Scope(["?"], {"aten": Entry("class")})
    aten = scopes["torch.ops.aten"] = Scope()
    listed = re.findall(r"^- func: ([\w.]+)\(", text, re.MULTILINE)
    for line in re.findall(r"^  autogen: (.*)$", text, re.MULTILINE):
        listed += line.split(", ")
    for name in listed:
        operation, _, overload = name.partition(".")
        aten.names[operation] = Entry("class")
        overloads = scopes.setdefault(f"torch.ops.aten.{operation}", Scope())
        overloads.names[overload or "default"] = Entry("value")


def _add_names_of_torch_itself(scopes: dict[str, Scope]) -> None:
    """Adds what ``torch/__init__.py`` copies in loops from its C extension, which no import statement says."""
    torch = scopes.get("torch")
    if torch is None:
        return
    for source, keep in (("torch._C", r"(?!_)(?!.*Base$)"), ("torch._C._VariableFunctions", r"(?!__)")):
        for name in scopes.get(source, Scope()).names:
            if re.match(keep, name):
                torch.names.setdefault(name, Entry("alias", f"{source}.{name}"))


def _resolve_stars(
    module: str, scopes: dict[str, Scope], stars: dict[str, list[str]], exported: dict[str, list[str]]
) -> None:
    """Puts the names that ``from x import *`` brings into a module, those of `x` first."""
    pending, stars[module] = stars[module], []
    for source in pending:
        if source in stars:
            _resolve_stars(source, scopes, stars, exported)
        names = exported.get(source)
        if names is None:
            names = [name for name in scopes.get(source, Scope()).names if not name.startswith("_")]
        for name in names:
            scopes[module].names.setdefault(name, Entry("alias", f"{source}.{name}"))


class _Reader:
    """Reads one file into the scope of its module and the scopes of its classes."""

    def __init__(self, module: str, is_package: bool, is_stub: bool, scopes: dict[str, Scope]) -> None:
        self.module = module
        self.stars: list[str] = []
        self.exported: list[str] | None = []
        """What `__all__` lists; None if there is none, or if it cannot be read."""
        self._package = module if is_package else module.rpartition(".")[0]
        self._is_stub = is_stub
        self._scopes = scopes
        self._has_all = False
        self._imported: dict[str, Entry] = {}
        """In a stub, imports without ``as`` are for its own use: the module does not have these names."""

    def read(self, tree: ast.Module) -> None:
        scope = self._scopes.setdefault(self.module, Scope())
        self._read_body(tree.body, self.module, scope)
        for node in ast.walk(tree):  # functions that make names of the module
            if isinstance(node, ast.Global):
                for name in node.names:
                    scope.names.setdefault(name, Entry("value"))
        if not self._has_all:
            self.exported = None

    def _read_body(self, body: Iterable[ast.stmt], path: str, scope: Scope) -> None:
        for node in _statements(body, self._is_stub):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._read_function(node, scope, is_method=path != self.module)
            elif isinstance(node, ast.ClassDef):
                self._read_class(node, path, scope)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.split(".")[0]
                    self._bind(scope, name, alias.name if alias.asname else name, alias.asname is not None)
            elif isinstance(node, ast.ImportFrom):
                self._read_import_from(node, scope)
            else:
                self._read_assignment(node, path, scope)

    def _read_import_from(self, node: ast.ImportFrom, scope: Scope) -> None:
        source = node.module or ""
        if node.level:
            above = self._package.split(".")[: len(self._package.split(".")) - node.level + 1]
            source = ".".join([*above, *([source] if source else [])])
        for alias in node.names:
            if alias.name == _STAR:
                self.stars.append(source)
            else:
                name = alias.asname or alias.name
                self._bind(scope, name, f"{source}.{alias.name}", alias.asname is not None)

    def _bind(self, scope: Scope, name: str, target: str, is_named: bool) -> None:
        in_torch = target == "torch" or target.startswith("torch.")
        names = self._imported if self._is_stub and not is_named else scope.names
        names.setdefault(name, Entry("alias", target) if in_torch else Entry("value"))

    def _read_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope, is_method: bool) -> None:
        given = node.args
        params = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        if is_method and params and params[0] in ("self", "cls"):
            params = params[1:]
        if given.kwarg:
            params.append("**")
        known = scope.names.get(node.name)
        if known is not None and known.kind == "function":  # an overload, or the other branch of a condition
            params = [*known.params, *(name for name in params if name not in known.params)]
        is_property = any(ast.unparse(one).split(".")[-1] in ("property", "setter") for one in node.decorator_list)
        scope.names[node.name] = Entry("value") if is_property else Entry("function", ",".join(params))

    def _read_class(self, node: ast.ClassDef, path: str, scope: Scope) -> None:
        name = f"{path}.{node.name}"
        scope.names[node.name] = Entry("class")
        inside = self._scopes.setdefault(name, Scope())
        for base in node.bases:
            dotted = _dotted(base.value if isinstance(base, ast.Subscript) else base)
            inside.bases.append(self._absolute(dotted, path, scope) if dotted else "?")
        for keyword in node.keywords:
            if keyword.arg == "metaclass":  # whose attributes the class has too
                dotted = _dotted(keyword.value)
                inside.bases.append(self._absolute(dotted, path, scope) if dotted else "?")
        self._read_body(node.body, name, inside)
        for part in ast.walk(node):  # ``self.name = value`` in a method
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _dotted(part.value) == "self":
                inside.names.setdefault(part.attr, Entry("value"))

    def _absolute(self, dotted: str, path: str, scope: Scope) -> str:
        """Returns the name that a base class or an assigned value has from outside; "?" if it is not torch's."""
        first, _, rest = dotted.partition(".")
        if first not in scope.names:
            path, scope = self.module, self._scopes[self.module]
        entry = scope.names.get(first) or self._imported.get(first)
        if entry.kind == "value" if entry is not None else not self.stars:
            return "?"
        start = entry.target if entry is not None and entry.kind == "alias" else f"{path}.{first}"
        return f"{start}.{rest}" if rest else start

    def _read_assignment(self, node: ast.stmt, path: str, scope: Scope) -> None:
        if isinstance(node, ast.Expr):
            self._read_export(node.value)
            return
        value = getattr(node, "value", None)
        for target in _targets(node):
            if isinstance(target, ast.Name):
                if target.id == "__all__" and path == self.module:
                    self._export(value, anew=not isinstance(node, ast.AugAssign))
                scope.names.setdefault(target.id, self._value(value, path, scope))
            elif isinstance(target, ast.Subscript) and ast.unparse(target) == "sys.modules[__name__]":
                if isinstance(value, ast.Call) and (cls := _dotted(value.func)):  # a module that is an object
                    scope.bases.append(self._absolute(cls, path, scope))
            elif isinstance(target, ast.Attribute) and (dotted := _dotted(target.value)):
                other = self._scopes.get(f"{path}.{dotted}")  # ``Class.name = value``
                if other is not None:
                    other.names.setdefault(target.attr, Entry("value"))

    def _value(self, value: ast.expr | None, path: str, scope: Scope) -> Entry:
        """Returns an alias for a chain of attributes, an instance for a call of a class, else any value."""
        is_made = isinstance(value, ast.Call)
        dotted = _dotted(value.func if isinstance(value, ast.Call) else value)
        absolute = self._absolute(dotted, path, scope) if dotted else "?"
        if is_made and not re.fullmatch(r"_*[A-Z]\w*", absolute.split(".")[-1]):  # not the name of a class
            absolute = "?"
        return Entry("value") if absolute == "?" else Entry("instance" if is_made else "alias", absolute)

    def _read_export(self, value: ast.expr) -> None:
        """Reads ``__all__.append(...)`` and ``__all__.extend(...)``."""
        if isinstance(value, ast.Call) and (called := _dotted(value.func)) and called.startswith("__all__."):
            argument = value.args[0] if value.args else None
            self._export(ast.List([argument]) if called.endswith("append") and argument else argument, anew=False)

    def _export(self, value: ast.expr | None, anew: bool) -> None:
        self._has_all = True
        texts = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
        names = [one.value for one in texts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if len(names) != len(texts) or (self.exported is None and not anew):
            self.exported = None
        else:
            self.exported = names if anew else [*(self.exported or ()), *names]


def _statements(body: Iterable[ast.stmt], is_stub: bool) -> Iterator[ast.stmt]:
    """Yields the statements of a body and of its conditions, loops and `with` blocks: what can be defined there.

    What stands under ``if TYPE_CHECKING`` is not defined when a program runs; in a stub it is.
    """
    for node in body:
        yield node
        if isinstance(node, ast.If) and not is_stub and "TYPE_CHECKING" in ast.unparse(node.test):
            is_negated = ast.unparse(node.test).startswith("not ")
            yield from _statements(node.body if is_negated else node.orelse, is_stub)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, ()), is_stub)
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body, is_stub)


def _targets(node: ast.stmt) -> Iterator[ast.expr]:
    """Yields what a statement assigns to, parts of tuples one by one."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        found = list(node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)):
        found = [node.target]
    elif isinstance(node, ast.With):
        found = [one.optional_vars for one in node.items if one.optional_vars is not None]
    while found:
        target = found.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            found.extend(target.elts)
        else:
            yield target


def _dotted(node: ast.AST | None) -> str | None:
    """Returns ``a.b.c`` for a chain of attributes, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (holder := _dotted(node.value)):
        return f"{holder}.{node.attr}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="a wheel of torch")
    wheel = parser.parse_args().wheel
    version = ".".join(wheel.name.split("-")[1].split(".")[:2])
    path = FOLDER / f"{version}.txt.gz"
    write_list(path, read_wheel(wheel), f"torch {wheel.name.split('-')[1]}, from {wheel.name}")
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
