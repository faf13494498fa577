"""Hooks on gradients of parameters, on ordinary parameters: they run after a backward, and move with a parameter."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from moreh_ap.device.patches import parameter_hooks


@pytest.fixture
def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def backward(parameter: nn.Parameter, factor: float) -> None:
    with parameter_hooks.after_backward():
        (parameter * factor).sum().backward()


def add_one(parameter: nn.Parameter) -> None:
    parameter.grad.add_(1)


def test_a_hook_changes_what_one_backward_adds(parameter):
    seen = []
    parameter_hooks.add(parameter, lambda gradient: gradient.clamp(max=2.0))
    parameter_hooks.add(parameter, seen.append)
    backward(parameter, 3.0)
    backward(parameter, 1.0)
    assert parameter.grad.tolist() == [3.0, 3.0]
    assert [one.tolist() for one in seen] == [[2.0, 2.0], [1.0, 1.0]]


def test_a_hook_on_the_sum_gets_the_parameter_with_its_gradient(parameter):
    sums = []
    parameter_hooks.add(parameter, lambda one: sums.append(one.grad.clone()), on_sum=True)
    backward(parameter, 3.0)
    backward(parameter, 1.0)
    assert [one.tolist() for one in sums] == [[3.0, 3.0], [4.0, 4.0]]


def test_a_backward_that_does_not_reach_a_parameter_leaves_its_gradient(parameter):
    parameter_hooks.add(parameter, lambda gradient: gradient * 9)
    parameter.grad = torch.full((2,), 5.0)
    backward(nn.Parameter(torch.ones(2)), 1.0)
    with pytest.raises(RuntimeError, match="does not require grad"), parameter_hooks.after_backward():
        torch.ones(()).backward()
    assert parameter.grad.tolist() == [5.0, 5.0]


def test_a_removed_hook_and_a_dropped_parameter_run_nothing(parameter):
    parameter_hooks.add(parameter, lambda gradient: gradient * 9).remove()
    backward(parameter, 1.0)
    assert parameter.grad.tolist() == [1.0, 1.0]
    parameter_hooks.add(nn.Parameter(torch.ones(1)), print)
    gc.collect()
    assert all(one.parameter is not None and len(one.parameter) != 1 for one in parameter_hooks.KNOWN.live())


def test_hooks_of_pytorch_move_with_a_parameter_and_back_and_their_handles_still_remove_them(parameter):
    handle = parameter.register_hook(lambda gradient: gradient * 2)
    parameter.register_post_accumulate_grad_hook(add_one)
    hooks = parameter_hooks.take(parameter, is_virtual=False)
    moved = nn.Parameter(torch.ones(2))
    parameter_hooks.give_back(moved, hooks, is_virtual=True)
    backward(moved, 1.0)
    assert moved.grad.tolist() == [3.0, 3.0]
    back = nn.Parameter(torch.ones(2))
    parameter_hooks.give_back(back, parameter_hooks.take(moved, is_virtual=True), is_virtual=False)
    back.sum().backward()
    assert back.grad.tolist() == [3.0, 3.0]
    handle.remove()
    back.sum().backward()
    assert back.grad.tolist() == [5.0, 5.0]


def test_a_frozen_parameter_gets_none(parameter):
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        parameter_hooks.add(parameter.requires_grad_(False), print)
    assert parameter_hooks.take(parameter, is_virtual=False) is None
