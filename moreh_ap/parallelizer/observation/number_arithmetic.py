"""Arithmetic of numbers that carry something beside their value: what it makes of them carries that, too.

Decides which operators are meant. Must not know what the numbers carry.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

_OF_ONE = ("neg",)
_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


def define_arithmetic(kind: type, evaluate: Callable[..., Any]) -> None:
    """Has operators of a subclass of `int` or `float` be evaluated by a function.

    Args:
        kind: The class.
        evaluate: Gets a function of the module `operator` and its operands, in order, and returns the result.
    """

    def operation(function: Callable[..., Any], *, is_turned: bool = False) -> Callable[..., Any]:
        def operate(self: Any, *others: Any) -> Any:
            if not all(isinstance(other, (int, float)) for other in others):
                return NotImplemented
            return evaluate(function, *(reversed((self, *others)) if is_turned else (self, *others)))

        return operate

    for name in _OF_TWO:
        function = getattr(operator, name)
        setattr(kind, f"__{name}__", operation(function))
        setattr(kind, f"__r{name}__", operation(function, is_turned=True))
    for name in _OF_ONE:
        setattr(kind, f"__{name}__", operation(getattr(operator, name)))
