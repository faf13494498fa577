"""Modules of PyTorch on host tensors: one look at the call, none at each operation, and the results of the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from moreh_ap.device import function_mode
from moreh_ap.device.host_tensors import HOST, HostTensor, as_ordinary
from moreh_ap.session.own_process.library_modules import call_at_once


@pytest.fixture(autouse=True)
def new_tensors_are_host_tensors(monkeypatch):
    monkeypatch.setattr(HOST, "holds_all", True)


@pytest.fixture
def seen(monkeypatch):
    """The functions that pass the function mode, but for those that this test calls."""
    found = []
    redirect_host = function_mode.redirect_host
    monkeypatch.setattr(
        function_mode, "redirect_host", lambda func, *rest: [found.append(func), redirect_host(func, *rest)][1]
    )
    return found


def here(module):
    """Returns a copy of a module with host tensors."""
    module = copy.deepcopy(module)
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = nn.Parameter(value.detach().cuda())
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = value.cuda()
        if isinstance(part, nn.RNNBase):
            part._init_flat_weights()
    return module


def leaves(result):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


CASES = {
    "linear": (lambda: nn.Linear(4, 3), [(2, 4)]),
    "layers": (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.LayerNorm(3), nn.GELU()), [(2, 4)]),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2)), [(2, 1, 6, 6)]),
    "lstm": (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True), [(5, 2, 4)]),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), [(2, 3, 4)] * 3),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2),
        [(3, 2, 4)],
    ),
    "activation": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, activation=torch.relu), [(3, 2, 4)]),
    "identity": (nn.Identity, [(2, 3)]),
}


@pytest.mark.parametrize("name", CASES)
def test_results_gradients_and_buffers_are_those_of_the_cpu(name, redirected, seen):
    make, shapes = CASES[name]
    module = make()
    other = here(module)
    values = [torch.randn(shape) for shape in shapes]
    inputs = [value.cuda() for value in values]
    seen.clear()
    result = call_at_once(other, tuple(inputs), {})
    assert not seen
    expected = module(*[value.clone() for value in values])
    assert all(type(tensor) is HostTensor for tensor in [*inputs, *other.parameters(), *other.buffers()])
    assert [type(one) for one in leaves(result)] == [HostTensor] * len(leaves(expected))
    for one, other_one in zip(leaves(result), leaves(expected), strict=True):
        assert torch.equal(as_ordinary(one), other_one)
    if leaves(expected)[0].requires_grad:
        leaves(expected)[0].pow(2).sum().backward()
        leaves(result)[0].pow(2).sum().backward()
        for parameter, wanted in zip(other.parameters(), module.parameters(), strict=True):
            assert torch.equal(as_ordinary(parameter.grad), wanted.grad)
    for buffer, wanted in zip(other.buffers(), module.buffers(), strict=True):
        assert torch.equal(as_ordinary(buffer), wanted)


class Own(nn.Linear):
    pass


def hooked(add):
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    add(module[0])
    return module


def with_attribute(module, name, value):
    module.__dict__[name] = value
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(4, 4),
        lambda: nn.Sequential(nn.ReLU(), Own(4, 4)),
        lambda: hooked(lambda layer: layer.register_forward_hook(lambda *_: None)),
        lambda: hooked(lambda layer: layer.register_forward_pre_hook(lambda *_: None)),
        lambda: hooked(lambda layer: layer.register_full_backward_hook(lambda *_: None)),
        lambda: hooked(lambda layer: layer.register_full_backward_pre_hook(lambda *_: None)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: with_attribute(nn.Linear(4, 4), "forward", lambda x: x),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, activation=lambda x: functional.relu(x)),
    ],
)
def test_code_of_the_script_in_a_module_has_each_operation_looked_at(make, redirected):
    assert call_at_once(here(make()), (torch.randn(2, 4).cuda(),), {}) is NotImplemented


def test_a_forward_that_the_script_has_put_into_a_class_of_pytorch(redirected, monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert call_at_once(here(nn.Linear(4, 4)), (torch.randn(2, 4).cuda(),), {}) is NotImplemented


def test_other_arguments_than_host_tensors_are_looked_at(redirected):
    module, x = here(nn.LSTM(4, 4)), torch.randn(3, 2, 4).cuda()
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
    for args in [(torch.randn(3, 2, 4),), (packed,), (x, (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)))]:
        assert call_at_once(module, args, {}) is NotImplemented


def test_modes_of_the_script_and_autocast_see_each_operation(redirected):
    module, x = here(nn.Linear(4, 4)), torch.randn(2, 4).cuda()
    torch.set_autocast_enabled("cuda", True)  # as inside of `torch.autocast`, which asks for a GPU
    try:
        assert call_at_once(module, (x,), {}) is NotImplemented
    finally:
        torch.set_autocast_enabled("cuda", False)
    with torch.device("cpu"):
        assert call_at_once(module, (x,), {}) is NotImplemented
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert call_at_once(module, (x,), {}) is NotImplemented


def test_an_error_leaves_all_tensors_as_they_were(redirected):
    module, x = here(nn.Linear(4, 4)), torch.randn(2, 5).cuda()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        call_at_once(module, (x,), {})
    assert all(type(tensor) is HostTensor for tensor in [x, *module.parameters()])
    assert torch.randn(2).device.type == "cpu"
