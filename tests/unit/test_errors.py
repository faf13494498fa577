"""Errors: what they say, that they survive a process boundary, and that each is documented."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from moreh_ap import errors

ROOT = Path(__file__).parents[2]
CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.MorehError) and cls.__module__ == errors.__name__
]


def test_all_lines():
    error = errors.PlanError("shard=0", "1 or more", 'plan="shard=2"', "docs/plan.md")
    assert str(error) == 'shard=0\nAllowed: 1 or more\nTry: plan="shard=2"\nSee: docs/plan.md'


def test_only_the_fact():
    assert str(errors.LoadError("no tensor 'w'")) == "no tensor 'w'\nSee: docs/errors.md#loaderror"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_pickle_keeps_everything(cls):
    error = cls("fact", "allowed", "fix", "link")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert (again.fact, again.allowed, again.fix, again.link) == ("fact", "allowed", "fix", "link")
    assert str(again) == str(error)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_has_its_section(cls):
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert cls.__name__ in headings


def test_wrong_values_are_value_errors():
    assert issubclass(errors.OptionError, ValueError)
    assert issubclass(errors.PlanError, ValueError)
    assert {cls for cls in CLASSES if issubclass(cls, RuntimeError)} == set(CLASSES)
