"""Functions and classes that libraries compile with `torch.jit.script` while the one line is on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moreh_ap.device.patches import export
from moreh_ap.patching import Patches


@pytest.fixture(autouse=True)
def installed():
    patches = Patches()
    export.install(patches)
    yield
    patches.undo()


@pytest.mark.filterwarnings("ignore")
def test_a_class_finds_the_names_of_where_it_is_compiled():
    @torch.jit.script
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    @torch.jit.script
    class Doubling:
        def __init__(self) -> None:
            self.times = 1

        def run(self, x: Tensor) -> Tensor:
            return doubled(x)

    assert Doubling().run(torch.ones(())) == 2
