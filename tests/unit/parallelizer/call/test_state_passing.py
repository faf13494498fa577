"""Which attributes that forwards have set are passed with a call."""

from __future__ import annotations

import torch
from torch import nn

from moreh_ap.parallelizer.call.state_passing import PassedState, with_tensors
from moreh_ap.parallelizer.trial.dry_run import StateBefore
from moreh_ap.protocol.passed_state import PASSED_STATE


def test_an_attribute_that_is_a_number_now_is_not_passed():
    model = nn.Sequential(nn.Linear(2, 2))
    model.hidden, model.count, model[0].states = torch.zeros(3, 2), 1.5, [torch.zeros(3), None]
    assert with_tensors(model, ["hidden", "count", "0.states", "removed"]) == {"hidden", "0.states"}


class Noting(nn.Module):
    """Writes a result into a buffer, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("value", torch.zeros(1))

    def forward(self, x):
        self.value[:] = 2 * self.weight
        return x * self.weight


def test_a_buffer_with_a_graph_can_be_written_into_where_it_is_passed():
    model, passed = Noting(), torch.ones(1, requires_grad=True)
    run = PassedState().around_forward({}, model, lambda args, kwargs: model(*args, **kwargs))
    run(*PassedState().prepared(model, (torch.ones(1),), {PASSED_STATE: {"value": passed}}))
    assert model.value.tolist() == [2.0] and passed.tolist() == [1.0]


def test_a_trial_leaves_no_graph_in_a_buffer():
    model = Noting()
    state = StateBefore(model)
    model(torch.ones(1)).backward()
    assert model.value.requires_grad
    state.put_back()
    assert not model.value.requires_grad and model.value.tolist() == [0.0]
