"""The import contracts have teeth: a planner that imports torch, or a second importer of the engine, is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("importlinter")


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("planner/search/plan_search.py", "import torch.distributed", "The planner is pure"),
        ("plan.py", "import monarch", "import the engine"),
        ("device/__init__.py", "import transformers", "Only moreh_ap.integrations imports transformers"),
    ],
)
def test_forbidden_import_is_found(tmp_path, module, line, contract):
    for package in ("moreh", "moreh_ap"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "moreh_ap" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout.replace("\n", " ")
