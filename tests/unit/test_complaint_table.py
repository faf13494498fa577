"""Every row of `tests/complaints.md` and `tests/ease.md` has tests, and every test named there exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = {
    code: row.strip(" |").split(" | ")
    for page in ("complaints.md", "ease.md")
    for code, row in re.findall(r"^\| ([CE]\d+) (\|.*)$", (TESTS / page).read_text(encoding="utf-8"), re.MULTILINE)
}


def test_no_row_is_left_out():
    assert list(ROWS) == [f"C{number}" for number in range(1, 28)] + [f"E{number}" for number in range(1, 17)]


@pytest.mark.parametrize("code", ROWS)
def test_the_tests_of_a_row_exist(code):
    shown = ROWS[code][-1:] if code.startswith("C") else ROWS[code][1:]
    assert len(shown) == (1 if code.startswith("C") else 2), "of what is easy: that it works, that misuse is explained"
    for cell in shown:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert named
        for path, name in named:
            tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"
