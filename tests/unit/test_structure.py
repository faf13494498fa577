"""The shape of the package and of its unit tests.

Crowded folders, long files, names, imports inside functions, circles of imports, and where a module's tests are.
Everything is read from the sources by `ast`; nothing of the package is imported. Every import counts: at the top of a
module, for type checkers only, and inside a function.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "moreh_ap"
TESTS = ROOT / "tests"

MOST_MODULES = 16
"""Modules of a folder, its `__init__.py` not counted."""

MOST_LINES = 400
"""Lines of a file."""

MOST_IN_A_CIRCLE = 3
"""Modules that import each other."""

MOST_IMPORTS_IN_FUNCTIONS = 12

IMPORTS_IN_FUNCTIONS = {
    # What `import torch` must not load: PyTorch imports the package at the end of its own import.
    ("moreh_ap", "option"): "not at `import torch`",
    ("moreh_ap", "session.checkpoint.training_checkpoint"): "not at `import torch`",
    ("moreh_ap", "integrations.transformers_import"): "not at `import torch`",
    ("integrations.transformers_import", "integrations.adamw"): "not at `import torch`",
    # An optional library: torchmonarch exists for Linux only, and its import takes a while.
    ("runtime.launcher", "runtime.engine"): "optional library: torchmonarch",
    # A library that is there only with a PyTorch built for GPUs, and that only losses over many logits need.
    ("parallelizer.loss.chunked_cross_entropy", "parallelizer.loss.cross_entropy_kernels"): "optional library: Triton",
    # What only several hosts need.
    ("accelerator.worker_starts", "runtime.host.host_pool"): "optional: several hosts",
    # Workers begin before it.
    ("accelerator.enabling", "accelerator.redirection"): "workers import what they need at the same time",
    # A library that is slow to import.
    ("device.values", "parallelizer.state.loading"): "imports torch.distributed.tensor, for reading files alone",
    ("parallelizer.call.pipelined_forward", "parallelizer.pipeline.schedules"): "imports the compiler: 1 s a worker",
    # What a command does without torch, or before it.
    ("cli.verify_command", "cli.plan_verification"): "sets CUDA_VISIBLE_DEVICES before torch is imported",
    ("toolkit.doctor", "toolkit.link_checks"): "imports torch, which may be what is missing",
}
"""Imports of our own inside functions, importer and imported, with the reason for each."""


@cache
def modules() -> dict[str, Path]:
    """Returns the file of every module, by its name without the package's; packages by the name of their folder."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name.removeprefix(f"{PACKAGE}."): path for name, path in found.items()}


@cache
def imports() -> dict[str, list[tuple[str, bool]]]:
    """Returns what every module imports of the package, and whether inside a function."""
    found: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for name, path in modules().items():
        for node, is_inside in _statements(ast.parse(path.read_text(encoding="utf-8"))):
            found[name] += [(target, is_inside) for target in _targets(node) if target != name]
    return found


def _statements(node: ast.AST, is_inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yields the statements in a node, each with whether it is inside a function; expressions are passed over."""
    is_inside = is_inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(node, name, ()):
            yield statement, is_inside
            yield from _statements(statement, is_inside)


def _targets(node: ast.AST) -> Iterator[str]:
    """Yields the modules of the package that a statement imports: a name that is no module counts as its module."""
    wanted: list[tuple[str, ...]] = []
    if isinstance(node, ast.Import):
        wanted = [(alias.name,) for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        assert not node.level, f"a relative import: {ast.unparse(node)}"
        wanted = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
    for names in wanted:
        for name in names:
            if name.removeprefix(f"{PACKAGE}.") in modules() and name.split(".")[0] == PACKAGE:
                yield name.removeprefix(f"{PACKAGE}.")
                break


def test_no_folder_is_crowded():
    folders: dict[Path, int] = defaultdict(int)
    for path in modules().values():
        folders[path.parent.relative_to(ROOT)] += path.name != "__init__.py"
    crowded = {str(folder): count for folder, count in folders.items() if count > MOST_MODULES}
    assert not crowded, f"more than {MOST_MODULES} modules: {crowded}"


def test_no_file_is_long():
    lengths = {name: path.read_text(encoding="utf-8").count("\n") for name, path in modules().items()}
    long = {name: lines for name, lines in lengths.items() if lines > MOST_LINES}
    assert not long, f"more than {MOST_LINES} lines: {long}"


def test_no_two_modules_have_one_name():
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        if path.name != "__init__.py":
            places[path.stem].append(name)
    shared = [names for names in places.values() if len(names) > 1]
    assert not shared, f"modules of one name: {shared}"


def test_no_two_folders_have_one_name():
    folders: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        if path.name == "__init__.py":
            folders[path.parent.name].append(name)
    shared = [names for names in folders.values() if len(names) > 1]
    assert not shared, f"folders of one name: {shared}"


def test_unit_tests_lie_where_their_modules_do():
    unit = TESTS / "unit"
    packages = {path.name for path in unit.iterdir() if (ROOT / PACKAGE / path.name / "__init__.py").is_file()}
    tested = {
        path.relative_to(unit): ROOT / PACKAGE / path.relative_to(unit).with_name(path.name.removeprefix("test_"))
        for package in packages
        for path in (unit / package).rglob("test_*.py")
    }
    assert {"planner", "session", "device"} <= packages
    lost = sorted(str(test) for test, module in tested.items() if not module.is_file())
    assert not lost, (
        f"tests/unit/PACKAGE/test_MODULE.py is for {PACKAGE}/PACKAGE/MODULE.py; no module of that name: {lost}"
    )
    elsewhere = {path.relative_to(unit).parts[0] for path in unit.rglob("*/*.py")} - packages
    assert elsewhere <= {"scripts", "tutorials"}, f"folders of no package: {elsewhere}"
    in_packages = {path.stem for path in modules().values() if path.parent != ROOT / PACKAGE}
    beside = [path for path in unit.glob("test_*.py") if path != Path(__file__)]  # this file is of the whole package
    flat = sorted(path.name for path in beside if path.stem.removeprefix("test_") in in_packages)
    assert not flat, f"beside the folder of their package: {flat}"


def test_no_two_test_files_have_one_name():
    """Pytest imports them as modules of their own, so that the second of a name would be taken for the first."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in TESTS.rglob("test_*.py"):
        places[path.name].append(str(path.relative_to(TESTS)))
    shared = [names for names in places.values() if len(names) > 1]
    assert not shared, f"test files of one name: {shared}"


def test_imports_inside_functions_are_listed_with_their_reason():
    found = {(name, target) for name, targets in imports().items() for target, is_inside in targets if is_inside}
    unlisted, gone = sorted(found - set(IMPORTS_IN_FUNCTIONS)), sorted(set(IMPORTS_IN_FUNCTIONS) - found)
    assert not unlisted, f"not in the list: {unlisted}"
    assert not gone, f"in the list, but gone: {gone}"
    assert len(found) <= MOST_IMPORTS_IN_FUNCTIONS


def test_no_circle_of_imports_is_large():
    reached = {name: _reached_from(name) for name in modules()}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in modules()}
    large = [sorted(circle) for circle in circles if len(circle) > MOST_IN_A_CIRCLE]
    assert not large, f"more than {MOST_IN_A_CIRCLE} modules that import each other: {large}"


def _reached_from(name: str) -> set[str]:
    """Returns the modules that a module imports, directly or through others."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for target, _ in imports()[waiting.pop()]:
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return seen


OF_LIBRARIES = ("torch/", "torchtitan/", "transformers/")
"""How paths begin that are in the sources of libraries."""


def test_files_that_sources_name_exist():
    """A docstring or comment that sends its reader to `some_file.py` is wrong once that file has another name."""
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts}
    lost = {
        f"{name}: {named}"
        for name, path in modules().items()
        for named in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8"))
        if not named.startswith(OF_LIBRARIES) and not any(f"/{file}".endswith(f"/{named}") for file in files)
    }
    assert not lost, f"no such files: {sorted(lost)}"


def test_notes_that_sources_name_are_where_they_say():
    texts = {path: path.read_text(encoding="utf-8") for path in modules().values()}
    notes: dict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        for note in re.findall(r'^(?:\s*|""")\[Note: ([^\]]+)\]', text, re.MULTILINE):
            notes[note].add(path.name)
    assert len(notes) > 50
    lost = {
        f"{path.relative_to(ROOT)}: [Note: {note}] in {named}"
        for path, text in texts.items()
        for note, named in re.findall(r"\[Note: ([^\]]+)\]\s+in\s+`(?:[\w/]+/)?(\w+\.py)`", text)
        if named not in notes[note]
    }
    assert not lost, f"no such notes: {sorted(lost)}"
