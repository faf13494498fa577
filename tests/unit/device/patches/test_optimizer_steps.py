"""Optimizers that are refused where a script makes them."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.device.patches import optimizer_steps
from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches


class FusedAdam(torch.optim.SGD):
    """As a library defines it that brings its own kernels."""


@pytest.fixture(autouse=True)
def refusing():
    patches = Patches()
    optimizer_steps._refuse_native_optimizers(patches.group("a test"))
    yield
    patches.undo()


@pytest.mark.parametrize("library", ["apex.optimizers.fused_adam", "deepspeed.ops.adam.fused_adam"])
def test_an_optimizer_that_needs_real_addresses_is_refused(library, monkeypatch):
    monkeypatch.setattr(FusedAdam, "__module__", library)
    with pytest.raises(UnsupportedError, match=rf"{library}\.FusedAdam hands addresses") as error:
        FusedAdam(torch.nn.Linear(2, 2).cuda().parameters(), lr=0.1)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()[1:]] == ["Allowed", "Try", "See"]
    FusedAdam(torch.nn.Linear(2, 2).parameters(), lr=0.1)


def test_others_are_not():
    FusedAdam(torch.nn.Linear(2, 2).cuda().parameters(), lr=0.1)
