"""What a trial keeps for its backward is in host memory, and changes no number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.parallelizer.state import host_activations
from moreh_ap.parallelizer.state.host_activations import saved_on_host
from moreh_ap.parallelizer.trial import probe


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def test_gradients_are_the_same_and_parameters_stay(monkeypatch):
    moved = []
    ours = host_activations._is_of_parameter

    def seen(tensor):
        stays = ours(tensor)
        moved.append((tuple(tensor.shape), stays))
        return stays

    monkeypatch.setattr(host_activations, "_is_of_parameter", seen)
    expected, got, x = model(), model(), torch.randn(3, 8)
    expected(x).square().sum().backward()
    with saved_on_host("cpu", least_bytes=0):
        loss = got(x).square().sum()
    loss.backward()
    for one, other in zip(got.parameters(), expected.parameters()):
        assert torch.equal(one.grad, other.grad)
    assert ((16, 4), True) in moved or ((4, 16), True) in moved, "the weight of a layer, as it was multiplied"
    assert {shape for shape, stays in moved if not stays} >= {(3, 8), (3, 16)}


@pytest.mark.parametrize(
    ("device_type", "least_bytes", "stays"), [("cpu", 0, False), ("cpu", 1 << 20, True), ("cuda", 0, True)]
)
def test_small_tensors_and_those_elsewhere_stay(device_type, least_bytes, stays):
    value = 2.0 * torch.randn(3, 8, requires_grad=True)
    with saved_on_host(device_type, least_bytes):
        saved = value.square().grad_fn._saved_self
    assert torch.equal(saved, value)
    assert (saved.data_ptr() == value.data_ptr()) == stays


def test_a_trial_of_more_rows_than_a_worker_trains_with_uses_it():
    class OfTwo(probe.Probe):
        def __init__(self, rows, workers, device):
            self.rows, self.chosen = rows, [0, 1]
            self.call = type("Call", (), {})()
            self.call.device, self.call.grad = torch.device(device), True
            self.call.axis = type("Axis", (), {"size": workers})()

    assert OfTwo(8, 8, "cuda")._exceeds_own_rows() and not OfTwo(16, 8, "cuda")._exceeds_own_rows()
    assert not OfTwo(8, 8, "cpu")._exceeds_own_rows(), "CPU workers have host memory alone"
