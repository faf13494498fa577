"""Numbers that carry something through arithmetic."""

from __future__ import annotations

from moreh_ap.parallelizer.observation.number_arithmetic import define_arithmetic


class Noted(int):
    """A number that notes what was computed with it."""

    notes: list[tuple[str, tuple[int, ...]]] = []


def test_each_operator_is_evaluated_with_its_operands_in_order():
    def evaluate(function, *numbers):
        Noted.notes.append((function.__name__, tuple(map(int, numbers))))
        return function(*map(int, numbers))

    define_arithmetic(Noted, evaluate)
    three = Noted(3)
    assert [three + 1, 7 - three, three // 2, 2**three, -three, three * 1.5] == [4, 4, 1, 8, -3, 3]
    assert Noted.notes[:4] == [("add", (3, 1)), ("sub", (7, 3)), ("floordiv", (3, 2)), ("pow", (2, 3))]
    assert three.__add__("a text") is NotImplemented
