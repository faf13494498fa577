"""Places in code."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from moreh_ap.parallelizer.observation.call_sites import is_called_by, is_called_here, site_of_call


def inner() -> int:
    return site_of_call()


def test_a_place_is_told_by_every_line_that_leads_there():
    in_a_loop = [inner() for _ in range(3)]
    one, other = inner(), inner()
    assert len({*in_a_loop}) == 1 and len({one, other, *in_a_loop}) == 3


NOTING = """
class PassingOn(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Noting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.sites, self.by_functional, self.here = [], [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.sites.append(site_of_call())
        self.by_functional.append(is_called_by("torch.nn.functional"))
        self.here.append(is_called_here())
        return func(*args, **(kwargs or {}))


class InPlaceOfExp(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return exp(*args) if func is torch.exp else func(*args, **(kwargs or {}))


def exp(x):
    return x.log1p()
"""
"""Modes as those of the package, whose own lines are left out of places."""


@pytest.fixture(scope="module")
def modes():
    names = {one.__name__: one for one in (TorchFunctionMode, site_of_call, is_called_by, is_called_here)}
    exec(NOTING, names := {**names, "torch": torch, "__name__": "moreh_ap.modes"})
    return SimpleNamespace(**names)


def test_a_mode_that_passes_functions_on_changes_no_place(modes):
    """A function that PyTorch has written in Python is entered once more for each mode."""
    x, found = torch.ones(2, 3), []
    for outer in (nullcontext(), modes.PassingOn(), modes.PassingOn()):
        noting = modes.Noting()
        with noting, outer:
            for function in (torch.exp, F.normalize):
                function(x)
        found.append(noting.sites[:2])
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 2


def test_functions_that_pytorch_calls_are_told_from_those_of_the_model(modes):
    x = torch.ones(2, 3)
    with modes.Noting() as noting:
        torch.exp(x)
        F.normalize(x)
    assert noting.by_functional == [False, True]


def test_functions_that_modes_call_themselves_are_told_from_those_that_they_pass_on(modes):
    x = torch.ones(2, 3)
    with modes.Noting() as noting, modes.PassingOn(), modes.InPlaceOfExp():
        torch.sin(x)
        torch.exp(x)
        F.normalize(x)
    assert noting.here == [False, True, False]
