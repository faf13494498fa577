"""Forwards that return an argument which they changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moreh_ap.protocol.objects.returned_arguments import hand_back, place_of


class Batch:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Fields(dict[str, Any]):
    name = ""


def test_the_argument_that_is_returned_is_found() -> None:
    batch, x = Batch(), torch.ones(1)
    assert place_of(batch, (x, batch), {}) == 1 and place_of(batch, (x,), {"data": batch}) == "data"
    assert place_of(Batch(), (x, batch), {}) is None
    assert place_of(x, (x,), {}) is None and place_of(None, (None,), {}) is None


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (Batch(x=1, gone=2), Batch(x=1, y=3)),
        ({"x": 1, "gone": 2}, {"x": 1, "y": 3}),
        ([1, 2], [1, 3]),
        (Fields(x=1), Fields(x=1, y=3)),
    ],
)
def test_it_takes_over_what_the_result_has(given: Any, result: Any) -> None:
    if isinstance(result, Fields):
        result.name = "changed"
    made = hand_back("data", (), {"data": given}, result)
    assert made is given and getattr(given, "__dict__", None) == getattr(result, "__dict__", None)
    assert isinstance(given, Batch) or given == result


def test_a_result_of_another_class_stays_what_it_is() -> None:
    batch, result = Batch(x=1), {"x": 2}
    assert hand_back(0, (batch,), {}, result) is result and batch.x == 1
