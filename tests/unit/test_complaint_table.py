"""Every complaint of `tests/complaints.md` has tests, and every test named there exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = {
    code: re.findall(r"`([\w/]+\.py)::(\w+)`", row)
    for code, row in re.findall(r"^\| (C\d+) (\|.*)$", (TESTS / "complaints.md").read_text(), re.MULTILINE)
}


def test_no_complaint_is_left_out():
    assert list(ROWS) == [f"C{number}" for number in range(1, 28)]


@pytest.mark.parametrize("code", ROWS)
def test_the_tests_of_a_complaint_exist(code):
    assert ROWS[code]
    for path, name in ROWS[code]:
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"
