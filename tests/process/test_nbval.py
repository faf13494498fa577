"""`make notebooks` notices what has changed in a notebook, and leaves no process behind."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from user_script import UserScript

nbformat = pytest.importorskip("nbformat", reason="needs nbformat, of the extra `dev`")
pytest.importorskip("nbval", reason="needs nbval, of the extra `dev`")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tutorials" / "notebooks"
MAKE = "import subprocess, sys; sys.exit(subprocess.call(['make', '-C', *sys.argv[1:]]))"


def cell_of(notebook, name):
    return next(cell for cell in notebook.cells if cell.id == name)


def replace(cell, before, after):
    assert before in cell.source
    cell.source = cell.source.replace(before, after)


def test_changed_cells_fail_and_no_others(tmp_path):
    """An output, an assertion, an unknown magic and a failing program; each is one cell of a real notebook."""
    folder = tmp_path / "copy"
    folder.mkdir()
    shutil.copy(FOLDER / "pictures.py", folder)
    notebook = nbformat.read(FOLDER / "quick_start.ipynb", as_version=4)
    output = cell_of(notebook, "reference").outputs[0]
    output.text, count = re.subn(r"(?<=step 40: loss )\d", "9", output.text)
    assert count == 1
    replace(cell_of(notebook, "difference"), "assert difference < 1e-3", "assert difference < -1")
    replace(cell_of(notebook, "one-device"), "print(", "%nosuchmagic\nprint(")
    failing = nbformat.v4.new_code_cell("%%bash\nset -e\nfalse\ntrue", id="failing", execution_count=1)
    notebook.cells.insert(1, failing)
    nbformat.write(notebook, folder / "quick_start.ipynb")

    names = [cell.id for cell in notebook.cells if cell.cell_type == "code"]
    report = tmp_path / "report.xml"
    with UserScript(
        *("-c", MAKE, ROOT, "notebooks", f"PY={sys.executable}", f"NOTEBOOKS={folder}"),
        cwd=tmp_path,
        PYTEST_ADDOPTS=f"--junitxml={report}",
    ) as run:
        assert run.wait(timeout_s=280) != 0, run.out
        run.leaves_nothing()
    results = ElementTree.parse(report).getroot().iter("testcase")
    failed = {names[int(one.get("name").split()[-1])] for one in results if one.find("failure") is not None}
    assert failed == {"failing", "reference", "difference", "one-device"}, run.out
