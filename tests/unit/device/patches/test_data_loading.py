"""Batches of tensors on the accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.dataloader import default_collate

from moreh_ap.device import tensor_classes
from moreh_ap.device.patches import data_loading
from moreh_ap.patching import Patches


class Volume(Tensor):
    """A tensor for which a library has a way of its own to make a batch."""


@pytest.fixture
def in_force():
    patches = Patches()
    tensor_classes.install(patches)
    data_loading.install(patches)
    yield
    patches.undo()


def test_a_library_puts_tensors_of_its_class_together(in_force, monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, Volume, lambda batch, *, collate_fn_map: torch.stack(batch, 1))
    volumes = [torch.ones(3).as_subclass(Volume) for _ in range(2)]
    assert default_collate([{"volume": volume.cuda()} for volume in volumes])["volume"].shape == (3, 2)
    assert default_collate(volumes).shape == (3, 2)
    assert default_collate([torch.ones(3, device="cuda")] * 2).shape == (2, 3)
