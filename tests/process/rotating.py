"""Marks variants of a test: the first of them run every day in CI, the others an eighth a day (`tests/conftest.py`)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def rotating_from(first: int, values: Iterable[object]) -> list[object]:
    """Returns parameters of a test, of which those from place `first` on are marked `rotating`."""
    return [
        value if place < first else pytest.param(value, marks=pytest.mark.rotating)
        for place, value in enumerate(values)
    ]
