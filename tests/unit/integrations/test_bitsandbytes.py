"""Weights of 4 and 8 bits are refused where they would move to the accelerator, with what to do instead."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from moreh_ap.errors import UnsupportedError
from moreh_ap.integrations import bitsandbytes
from moreh_ap.patching import Patches


class Params4bit(torch.nn.Parameter):
    """As the library's: its moves are its own."""

    def to(self, *args, **kwargs):
        return "moved"


class Int8Params(Params4bit):
    def to(self, *args, **kwargs):
        return "moved"


class Bnb4BitHfQuantizer:
    quantization_config = types.SimpleNamespace()


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins for the two modules that are changed."""
    modules = types.ModuleType("bitsandbytes.nn.modules")
    modules.Params4bit, modules.Int8Params = Params4bit, Int8Params
    modeling = types.ModuleType("transformers.modeling_utils")
    modeling.get_hf_quantizer = lambda quantizer, device_map: (quantizer, None, device_map)
    for module in (modules, modeling):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    patches = Patches()
    bitsandbytes.install(patches)
    yield modules, modeling
    patches.undo()


@pytest.mark.parametrize("kind", [Params4bit, Int8Params])
def test_a_packed_weight_may_not_move_to_the_accelerator(libraries, kind):
    weight = kind(torch.zeros(4), requires_grad=False)
    assert weight.to("cpu") == weight.to(torch.bfloat16) == "moved"
    for device in ("cuda", torch.device("cuda", 0)):
        with pytest.raises(UnsupportedError, match=kind.__name__) as caught:
            weight.to(device)
    assert "bfloat16" in caught.value.allowed and "dtype=torch.bfloat16" in str(caught.value)


def test_nor_be_loaded_there(libraries):
    load = libraries[1].get_hf_quantizer
    for device_map in ({"": 0}, "auto", None):
        with pytest.raises(UnsupportedError, match="of bitsandbytes"):
            load(Bnb4BitHfQuantizer(), device_map)
    for device_map in ("cpu", {"": "cpu"}):
        assert load(Bnb4BitHfQuantizer(), device_map)[2] == device_map
    assert load(None, "auto") == (None, None, "auto")


def test_afterwards_everything_is_as_before(monkeypatch):
    modules = types.ModuleType("bitsandbytes.nn.modules")
    modules.Params4bit, modules.Int8Params = Params4bit, Int8Params
    monkeypatch.setitem(sys.modules, modules.__name__, modules)
    before = Params4bit.to
    patches = Patches()
    bitsandbytes.install(patches)
    assert Params4bit.to is not before
    patches.undo()
    assert Params4bit.to is before
