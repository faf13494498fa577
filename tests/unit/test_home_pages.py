"""The figures on the first pages are those of the pages that they link to."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOMES = [ROOT / "README.md", DOCS / "index.md", DOCS / "index.ko.md"]
TITLES = {
    "DDP": "step time, against torchrun DDP",
    "FSDP2": "step time, against torchrun FSDP2",
    "tensor": "step time, `tensor=2`, against `train_tp.py`",
    "pipeline": "step time, `pipeline=2`, against `train_pp.py`",
}


@pytest.fixture(params=HOMES, ids=lambda page: page.name)
def numbers(request) -> list[str]:
    """The three rows of figures of a first page."""
    text = request.param.read_text(encoding="utf-8")
    table = text.split("\n## ")[1]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) == 3, table
    return rows


def test_scripts_that_run_unchanged(numbers):
    scripts = list((ROOT / "tests" / "frameworks" / "scripts").glob("*.py"))
    page = (DOCS / "frameworks.md").read_text(encoding="utf-8").split("## QLoRA")[0]
    rows = re.findall(r"^\|([^|]*)\|[^|]+\| (yes|no)\b", page, re.MULTILINE)
    libraries = {name for name, _ in rows if name.strip()}
    num_whole = sum(split == "no" for _, split in rows)
    expected = {len(scripts), len(libraries), len(scripts) - num_whole}
    assert {int(number) for number in re.findall(r"\d+", numbers[0])} == expected


def test_cells_of_the_matrix(numbers):
    cells = json.loads((DOCS / "reference" / "exactness.json").read_text(encoding="utf-8"))
    verdicts = collections.Counter(cell["verdict"] for cell in cells)
    assert set(verdicts) <= {"exact", "unsplit", "refused"}, "the pages say that none is wrong"
    expected = {len(cells), len(cells) - verdicts["refused"], verdicts["refused"]}
    assert {int(number) for number in re.findall(r"\d+", numbers[1])} == expected


def test_step_times(numbers):
    measured = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    for title in TITLES.values():
        row = next(line for line in measured.splitlines() if line.startswith(f"| {title} |"))
        ratio = re.findall(r"x\d\.\d\d", row.split("|")[2])[0]
        assert ratio in numbers[2], f"{title}: {ratio}"
    assert len(re.findall(r"x\d\.\d\d", numbers[2])) == len(TITLES)
