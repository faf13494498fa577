"""What forwards do on the workers alone is told once: as a copy, or by a warning."""

from __future__ import annotations

import warnings

import pytest

from moreh_ap.session.models.left_on_workers import LeftOnWorkers


def copy_none(names: list[str]) -> set[str]:
    return set()


def test_an_attribute_that_can_be_copied_is_copied_and_another_is_warned_of_once():
    left, asked = LeftOnWorkers("Model"), []

    def copy(names: list[str]) -> set[str]:
        asked.append(names)
        return {"criterion"}

    left.note(("norm", "criterion", "own"))
    with pytest.warns(UserWarning, match=r"^forward\(\) of Model sets norm in the workers"):
        left.tell({"own"}, copy, silently=False)
    left.note(("norm",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        left.tell((), copy, silently=False)
    assert asked == [["norm", "criterion"]] and not left.names


def test_a_warning_of_the_workers_is_given_once_in_its_class():
    left = LeftOnWorkers("Model")
    left.note((), ("writes a file",))
    left.warnings["by our fault"] = FutureWarning
    with pytest.warns(Warning) as given:
        left.tell((), copy_none, silently=False)
    assert [(str(one.message), one.category) for one in given] == [
        ("writes a file", UserWarning),
        ("by our fault", FutureWarning),
    ]
    left.note((), ("writes a file",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        left.tell((), copy_none, silently=False)


def test_nothing_is_copied_or_said_where_it_is_not_wanted():
    left = LeftOnWorkers("Model")
    left.note(("norm",), ("writes a file",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        left.tell((), lambda names: pytest.fail("copied"), silently=True)
    assert not left.names and not left.warnings
