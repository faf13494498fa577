"""What pip installs with the package is what the package imports; what only tutorials or tests import is an extra."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

OPTIONAL = {"deepspeed", "matplotlib", "pynvml", "triton", "wandb"}
"""Imported where they are asked for; without them the package does without. Triton comes with PyTorch for GPUs."""

DISTRIBUTIONS = {
    "monarch": "torchmonarch",
    "tokenizers": "transformers",
    "kubernetes_validate": "kubernetes-validate",
    "yaml": "pyyaml",
    "xdist": "pytest-xdist",
}
"""Distributions that bring a module of another name, of their own or of what they need."""


_IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)


def imported(folders: Iterable[str]) -> set[str]:
    """Names of the top-level modules that files import, except for Python's own, files beside them and `tests/unit`.

    Only files with a line that may import something new are parsed: that takes most of the time.
    """
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    frameworks = ROOT / "tests" / "frameworks"  # its environments are listed in `requirements`
    paths = [path for path in paths if frameworks not in path.parents]
    beside = {path.stem for path in paths if path.parts[len(ROOT.parts)] not in ("moreh", "moreh_ap")}
    own = {*sys.stdlib_module_names, *beside, "moreh", "moreh_ap", "unit"}
    found: set[str] = set()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if own.union(found).issuperset(_IMPORT.findall(text)):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
    return found - own


def listed(name: str) -> set[str]:
    """Names of the distributions in a list of pyproject.toml."""
    inside = re.search(rf"^{name} = \[(.*?)\]$", TEXT, re.MULTILINE | re.DOTALL)
    assert inside is not None
    return {Requirement(text).name for text in re.findall(r'"([^"]+)"', inside[1])}


def test_dependencies_are_what_the_package_imports():
    modules = imported(["moreh_ap", "moreh"]) - OPTIONAL
    assert {DISTRIBUTIONS.get(name, name) for name in modules} == listed("dependencies")


@pytest.mark.parametrize(
    ("folders", "extras"),
    [(["tutorials"], ["tutorials"]), (["tutorials", "tests", "scripts"], ["tutorials", "dev", "docs"])],
)
def test_extras_bring_what_else_is_imported(folders, extras):
    modules = {DISTRIBUTIONS.get(name, name) for name in imported(folders) - OPTIONAL}
    assert modules - listed("dependencies") <= set.union(*map(listed, extras))
