"""A terminal that is wide enough for every table."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
