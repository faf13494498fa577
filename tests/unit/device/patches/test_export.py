"""Compiling code while the accelerator is enabled."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.device.patches import export
from moreh_ap.patching import Patches


@pytest.fixture
def in_force():
    patches = Patches()
    export.install(patches)
    yield
    patches.undo()


def test_annotations_of_a_class_mean_what_they_mean_where_it_is_compiled(in_force):
    Numbers = list[torch.Tensor]  # a name that is known here alone

    class Adder:
        def __init__(self, first: torch.Tensor) -> None:
            self.first = first

        def add(self, others: Numbers) -> torch.Tensor:
            return self.first + others[0]

    made = torch.jit.script(Adder)
    assert made(torch.ones(2)).add([torch.ones(2)]).tolist() == [2.0, 2.0]
