"""Puts back what a trial run changes outside of the model: variables of the script, and what hooks keep.

Decides how a value is put back; which there are is for `protocol/script_code/script_globals.py` to know.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moreh_ap.protocol.module_attributes import has_memory
from moreh_ap.protocol.script_code.script_globals import kept_outside
from moreh_ap.protocol.script_code.value_forms import is_record


@contextlib.contextmanager
def outside_restored(module: nn.Module) -> Iterator[None]:
    """Puts variables outside of the model that its forwards read, and what its hooks keep, back after the block."""
    before = [(variable, variable.value()) for variable in kept_outside(module)]
    refills = [_refilling(value) for _, value in before]
    try:
        yield
    finally:
        for refill in refills:
            refill()
        for variable, value in before:
            if variable.value() is not value:
                variable.set(value)


def _refilling(value: Any) -> Callable[[], object]:
    """Returns what gives a value the contents that it has now."""
    if isinstance(value, Tensor) and value.is_leaf and not value.requires_grad and has_memory(value):
        kept = value.detach().clone()
        return lambda: None if torch.equal(value, kept) else value.copy_(kept)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, (list, deque)):
        items = list(value)
        return lambda: (value.clear(), value.extend(items))
    if isinstance(value, (dict, set)):
        copied = value.copy()
        return lambda: (value.clear(), value.update(copied))
    if is_record(value):
        attributes = dict(vars(value))
        inside = [_refilling(one) for one in attributes.values() if not is_record(one)]
        return lambda: ([refill() for refill in inside], vars(value).clear(), vars(value).update(attributes))
    return lambda: None
