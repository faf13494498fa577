"""The functions and modules that a forward calls, in order, and the numbers that they get.

Decides what is noted of each. Must not know why; `lockstep.py` finds in it which numbers follow the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moreh_ap.parallelizer.observation.call_sites import GATHERING, is_called_by
from moreh_ap.parallelizer.observation.module_calls import Original, module_step, seeing_modules
from moreh_ap.parallelizer.observation.number_arithmetic import define_arithmetic
from moreh_ap.parallelizer.observation.torch_calls import function_name, is_question, leaves_of
from moreh_ap.parallelizer.surroundings.placement import OwnDevice


@dataclass
class Called:
    """A call of a torch function or module in a forward of fewer rows.

    Attributes:
        name: The function or module.
        numbers: The leaves of its arguments, with everything but numbers left out (None), and so are numbers that the
            forward has read from a tensor: they follow values, not the number of rows.
        after: The position of the first call that is not inside it.
    """

    name: str
    numbers: list[float | None]
    after: int


class _ReadInt(int):
    """A whole number that a forward has read from a tensor; what arithmetic makes of it is another one."""


class _ReadFloat(float):
    """The same of a fraction."""


def _mark(value: Any) -> Any:
    if type(value) is list:
        return [_mark(one) for one in value]
    return _ReadInt(value) if type(value) is int else _ReadFloat(value) if type(value) is float else value


def _evaluate(function: Callable[..., Any], *numbers: Any) -> Any:
    return _mark(function(*(int(one) if isinstance(one, int) else float(one) for one in numbers)))


for _kind in (_ReadInt, _ReadFloat):
    define_arithmetic(_kind, _evaluate)

_READ = frozenset({"tolist", "item"})


class NumberRecorder(OwnDevice):
    """Records the functions and modules that a forward calls, and the numbers among their arguments.

    Attributes:
        calls: In order.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.calls: list[Called] = []

    def __enter__(self) -> NumberRecorder:
        self._modules = seeing_modules(self._call_module)
        self._modules.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._modules.__exit__(*raised)
        super().__exit__(*raised)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_question(func) or is_called_by(GATHERING):
            return super().__torch_function__(func, types, args, kwargs)
        name = self._record(function_name(func), args, kwargs).name
        result = super().__torch_function__(func, types, args, kwargs)
        return _mark(result) if name in _READ else result

    def _call_module(self, call: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        called = self._record(module_step(module), args, kwargs)
        result = call(*args, **kwargs)
        called.after = len(self.calls)
        return result

    def _record(self, name: str, args: Any, kwargs: Any) -> Called:
        numbers = [leaf if type(leaf) in (int, float) else None for leaf in leaves_of((args, kwargs))]
        called = Called(name, numbers, len(self.calls) + 1)
        self.calls.append(called)
        return called
