"""Forwards that change parameters: noticed, undone in a rehearsal, and kept in the parameter that is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.call.parameter_writes import WrittenParameters, keep_parameters
from moreh_ap.protocol.blocks import modules_aside


class Changing(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.ones(3, 2)), change

    def forward(self, x):
        self.change(self)
        return x @ self.weight


def assign_data(module):
    module.weight.data = module.weight.data * 2


def in_place(module):
    with torch.no_grad():
        module.weight.clamp_(max=0.5)


def in_place_data(module):
    module.weight.data[0].mul_(3)


def replace(module):
    module.weight = nn.Parameter(module.weight.detach() * 2)


@pytest.mark.parametrize("change", [assign_data, in_place, in_place_data, replace])
def test_what_a_forward_changes_is_noticed_and_undone(change):
    module = Changing(change)
    weight = module.weight
    with WrittenParameters(module) as written, keep_parameters(module):
        module(torch.ones(1, 3))
        expected = module.weight.detach().clone()
    assert written.names == ["weight"]
    assert module.weight is weight and torch.equal(weight, torch.ones(3, 2))
    assert list(written.state) == ["weight"] and torch.equal(written.state["weight"], expected)
    assert not torch.equal(expected, weight)


def test_a_parameter_that_is_written_and_then_given_other_data_is_what_it_was_and_named_once():
    def both(module):
        in_place_data(module)
        assign_data(module)

    module = Changing(both)
    with WrittenParameters(module) as written:
        module(torch.ones(1, 3))
    assert written.names == ["weight"] and torch.equal(module.weight, torch.ones(3, 2))
    assert torch.equal(written.state["weight"], torch.tensor([[6.0, 6.0], [2.0, 2.0], [2.0, 2.0]]))


def test_a_backward_of_what_a_forward_computed_with_a_parameter_that_it_had_changed_still_runs():
    module = Changing(in_place)
    with WrittenParameters(module):
        loss = (module(torch.ones(1, 3, requires_grad=True)) ** 2).sum()
    loss.backward()
    assert module.weight.grad is not None


def test_an_embedding_with_a_largest_norm_writes_its_weight_and_a_linear_layer_does_not():
    embedding, linear = nn.Embedding(4, 2, max_norm=0.1), nn.Linear(3, 2)
    with WrittenParameters(embedding) as written:
        embedding(torch.tensor([1]))
    assert written.names == ["weight"]
    with WrittenParameters(linear) as written:
        F.relu_(linear(torch.ones(1, 3)))
    assert written.names == []


def test_a_parameter_in_another_s_place_gives_it_its_value():
    module = Changing(lambda module: None)
    weight, other = module.weight, nn.Linear(2, 2)
    with keep_parameters(module):
        replace(module)
        other.weight = nn.Parameter(torch.zeros(2, 2))
    assert module.weight is weight and torch.equal(weight, torch.full((3, 2), 2.0))
    assert torch.equal(other.weight, torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match="puts another parameter in place of weight"):
        module(torch.ones(1, 3)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"shape \(4,\) in place of weight"), keep_parameters(module):
        module.weight = nn.Parameter(torch.ones(4))


def test_modules_in_lists_of_python_are_found_by_parameters_that_are_registered_beside_them():
    module, other = nn.Module(), nn.Linear(2, 2)
    module.registered = nn.Linear(2, 2)
    module.stacks = [[nn.Sequential(nn.Linear(2, 2))], {"a": (other,)}, module.registered]
    module.stacks.append(module.stacks)
    assert modules_aside(module) == []
    inside = module.stacks[0][0]
    module.parameters_list = nn.ParameterList(inside.parameters())
    assert modules_aside(module) == [inside[0]]


def test_what_was_gathered_before_and_is_freed_meanwhile_is_not_put_back():
    """FSDP2 frees the memory of parameters that an error had left gathered: to write there ended the worker."""
    module = Changing(in_place)
    with WrittenParameters(module) as written:
        module(torch.ones(2, 3))
        module.weight.untyped_storage().resize_(0)
    assert written.names == ["weight"] and not written.state
