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

OPTIONAL = {"deepspeed", "matplotlib", "pynvml", "wandb"}
"""Imported where they are asked for; without them the package does without, and tutorials say how to install them."""

DISTRIBUTIONS = {
    "monarch": "torchmonarch",
    "tokenizers": "transformers",
    "kubernetes_validate": "kubernetes-validate",
    "yaml": "pyyaml",
    "xdist": "pytest-xdist",
}
"""Distributions that bring a module of another name, of their own or of what they need."""


def imported(folders: Iterable[str]) -> set[str]:
    """Names of the top-level modules that files import, except for Python's own, files beside them and `tests/unit`."""
    found, beside = set(), {"moreh", "moreh_ap", "unit"}
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        if (ROOT / "tests" / "frameworks") in path.parents:
            continue  # its environments are listed in `requirements`
        if path.parts[len(ROOT.parts)] not in ("moreh", "moreh_ap"):
            beside.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
    return found - set(sys.stdlib_module_names) - beside


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
