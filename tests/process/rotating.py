"""Marks variants of a test: the first of them run every day in CI, the others an eighth a day (`tests/conftest.py`)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def rotating_from(first: int, values: Iterable[object]) -> list[object]:
    """Returns parameters of a test, tuples of them for several, of which those from place `first` on rotate."""
    rotating = [value if isinstance(value, tuple) else (value,) for value in values]
    return [
        pytest.param(*one, marks=() if place < first else pytest.mark.rotating) for place, one in enumerate(rotating)
    ]
