"""Variables outside of a model, compared from call to call."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from moreh_ap.session.models.global_changes import GlobalChanges, warn_of_writes

GENERATOR = torch.Generator()
MASK, LARGE, TRAINED = torch.ones(2), [0] * 100_000, [nn.Parameter(torch.ones(1))]


class Net(nn.Module):
    def forward(self, x):
        return x * MASK + LARGE[0]


class Draws(nn.Module):
    def forward(self, x):
        return x + torch.rand(2, generator=GENERATOR)


class Trained(nn.Module):
    def forward(self, x):
        return x * TRAINED[0]


def made(gain):
    class Enclosed(nn.Module):
        def forward(self, x):
            return x * gain

    def set_gain(value):
        nonlocal gain
        gain = value

    return Enclosed(), set_gain


def names(changes):
    return sorted(name for _, name, _ in changes)


def test_a_tensor_is_sent_when_it_has_changed(monkeypatch):
    changes = GlobalChanges(Net())
    assert names(changes.take()) == ["LARGE", "MASK"]  # of an imported module: workers have what it had at first
    assert changes.take() == []
    MASK.mul_(2)
    assert names(changes.take()) == ["MASK"]
    monkeypatch.setitem(globals(), "MASK", torch.ones(2))
    assert names(changes.take()) == ["MASK"]
    assert changes.take() == []


def test_a_large_value_is_compared_now_and_then_and_always_once_it_has_changed(monkeypatch):
    monkeypatch.setitem(globals(), "LARGE", [0] * 100_000)
    changes = GlobalChanges(Net())
    for _ in range(5):
        changes.take()
    LARGE[0] = 1
    assert changes.take() == changes.take() == []
    with pytest.warns(UserWarning, match="LARGE is large, so that it is not compared at every call"):
        assert names(changes.take()) == ["LARGE"]
    LARGE[0] = 2
    assert names(changes.take()) == ["LARGE"] and changes.take() == []


def test_a_variable_of_one_of_several_functions_is_warned_of():
    (first, _), (second, set_gain) = made(1.0), made(2.0)
    changes = GlobalChanges(nn.Sequential(first, second))
    assert changes.take() == []
    set_gain(3.0)
    with pytest.warns(UserWarning, match=r"gain has changed, which several functions named forward read"):
        assert changes.take() == []
    alone = GlobalChanges(second)
    set_gain(4.0)
    assert names(alone.take()) == ["gain"]


def test_a_tensor_outside_of_the_model_that_wants_a_gradient_is_warned_of():
    with pytest.warns(UserWarning, match=r"reads TRAINED, outside of the model, which requires a gradient"):
        warn_of_writes(Trained())
    with pytest.warns(UserWarning, match=r"reads GENERATOR, a random number generator of its own"):
        warn_of_writes(Draws())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_writes(Net())
