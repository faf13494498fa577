"""Weights of 4 bits are packed in the controller and move as bytes and constants; those of 8 bits are refused."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from torch import nn

from moreh_ap.device.patches import quantized_weights
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches


class State:
    """Constants of a packed weight, as the library keeps them."""

    def __init__(self, absmax, shape):
        self.absmax, self.shape = absmax, shape

    def to(self, device):
        self.absmax = self.absmax.to(device)


class Int8Params(nn.Parameter):
    def to(self, *args, **kwargs):
        return "moved"


class Bnb8BitHfQuantizer:
    quantization_config = types.SimpleNamespace()


def params4bit():
    """Returns a new class of packed weights, which moves and packs as the library's does."""

    class Params4bit(nn.Parameter):
        def __new__(cls, data=None, requires_grad=False, quant_state=None, bnb_quantized=False):
            self = torch.Tensor._make_subclass(cls, data, requires_grad)
            self.quant_state, self.bnb_quantized = quant_state, bnb_quantized
            return self

        def _quantize(self, device):
            weight = self.data.to(device)
            absmax = weight.abs().amax()
            self.data = (weight / absmax * 127).round().to(torch.int8).view(torch.uint8).reshape(-1, 1)
            self.quant_state, self.bnb_quantized = State(absmax, weight.shape), True
            return self

        def to(self, *args, **kwargs):
            device = torch._C._nn._parse_to(*args, **kwargs)[0]
            return self._quantize(device) if device is not None and not self.bnb_quantized else self

        def cuda(self, device=None):
            return self.to("cuda")

        def cpu(self):
            return self.to("cpu")

        def __deepcopy__(self, memo):
            return type(self)(self.data.clone(), False, copy.deepcopy(self.quant_state), self.bnb_quantized)

        @classmethod
        def from_prequantized(cls, data, quantized_stats, device="cuda"):
            made = torch.Tensor._make_subclass(cls, data.to(device))
            made.quant_state, made.bnb_quantized = State(quantized_stats["absmax"].to(device), (2, 4)), True
            return made

    return Params4bit


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins for the two modules that are changed."""
    modules = types.ModuleType("bitsandbytes.nn.modules")
    modules.Params4bit, modules.Int8Params = params4bit(), Int8Params
    modeling = types.ModuleType("transformers.modeling_utils")
    modeling.get_hf_quantizer = lambda quantizer, device_map: (quantizer, None, device_map)
    for module in (modules, modeling):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    patches = Patches()
    quantized_weights.install(patches)
    yield modules, modeling
    patches.undo()


@pytest.fixture
def weight():
    return torch.tensor([[1.0, -2.0, 3.0, -4.0], [0.5, 0.25, 0.0, 1.0]])


def test_a_weight_is_packed_as_on_the_cpu_and_bytes_and_constants_are_on_the_accelerator(libraries, weight):
    cls = libraries[0].Params4bit
    here = cls(weight.clone()).to("cpu")
    there = cls(weight.clone()).to("cuda")
    assert isinstance(there, VirtualTensor) and there.device == torch.device("cuda", 0)
    assert isinstance(there, cls) and isinstance(there, nn.Parameter) and type(there).__name__ == "Params4bit"
    assert not there.requires_grad and there.dtype == torch.uint8 and there.bnb_quantized
    assert torch.equal(there.detach().to_host(), here.data) and there.quant_state.absmax.is_cuda
    assert there.to("cuda") is there and there.cuda() is there and there.to(torch.bfloat16) is there


def test_a_weight_that_is_on_the_accelerator_already_is_read_to_be_packed(libraries, weight):
    cls = libraries[0].Params4bit
    there = cls(weight.cuda()).to(torch.device("cuda", 0))
    assert there.is_cuda and torch.equal(there.cpu().data, cls(weight.clone()).to("cpu").data)


def test_a_weight_moves_there_and_back_any_number_of_times_and_stays_a_parameter(libraries, weight):
    cls = libraries[0].Params4bit
    expected, moved = cls(weight.clone()).to("cpu").data, cls(weight.clone())
    for device in ("cuda", "cpu", "cuda", "cpu"):
        moved = nn.Parameter(moved.to(device), False)  # as `nn.Module.to` makes one
        assert isinstance(moved, cls) and moved.is_cuda == moved.quant_state.absmax.is_cuda == (device == "cuda")
    assert torch.equal(moved.data, expected)


def test_a_copy_has_bytes_and_constants_of_its_own(libraries, weight):
    there = libraries[0].Params4bit(weight.clone()).to("cuda")
    copied = copy.deepcopy(there)
    assert copied.is_cuda and type(copied) is type(there) and copied.quant_state is not there.quant_state
    assert there.quant_state.absmax.is_cuda and copied.quant_state.absmax.is_cuda
    assert torch.equal(copied.cpu().data, there.cpu().data)


def test_a_weight_that_was_packed_in_its_file_moves(libraries):
    cls, stats = libraries[0].Params4bit, {"absmax": torch.tensor(4.0)}
    data = torch.arange(8, dtype=torch.uint8).reshape(-1, 1)
    for given in (data, data.cuda()):
        there = cls.from_prequantized(given, dict(stats), device="cuda:0")
        assert there.is_cuda and there.quant_state.absmax.is_cuda and torch.equal(there.cpu().data, data)
    assert cls.from_prequantized(data, dict(stats), device="cpu").device.type == "cpu"


def test_weights_of_8_bits_may_not_move_to_the_accelerator(libraries):
    weight = Int8Params(torch.zeros(4), requires_grad=False)
    assert weight.to("cpu") == weight.to(torch.bfloat16) == "moved"
    for device in ("cuda", torch.device("cuda", 0)):
        with pytest.raises(UnsupportedError, match="Int8Params of bitsandbytes") as caught:
            weight.to(device)
    assert "4 bits" in caught.value.allowed and "load_in_4bit=True" in str(caught.value)


def test_nor_be_loaded_there(libraries):
    load = libraries[1].get_hf_quantizer
    for device_map in ({"": 0}, "auto", None):
        with pytest.raises(UnsupportedError, match="of bitsandbytes"):
            load(Bnb8BitHfQuantizer(), device_map)
    for device_map in ("cpu", {"": "cpu"}):
        assert load(Bnb8BitHfQuantizer(), device_map)[2] == device_map
    assert load(None, "auto") == (None, None, "auto")


def test_afterwards_everything_is_as_before(monkeypatch):
    modules = types.ModuleType("bitsandbytes.nn.modules")
    modules.Params4bit, modules.Int8Params = params4bit(), Int8Params
    monkeypatch.setitem(sys.modules, modules.__name__, modules)
    before = dict(vars(modules.Params4bit)), Int8Params.to
    patches = Patches()
    quantized_weights.install(patches)
    assert modules.Params4bit.to is not before[0]["to"]
    patches.undo()
    assert (dict(vars(modules.Params4bit)), Int8Params.to) == before
