"""Which attributes of a model a script may have set as the state of its rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.protocol.passed_state import add_trained, keeps_tensors, names_with_rows, trained_attributes


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6, 6))


@pytest.mark.parametrize(
    ("state", "first", "found"),
    [
        ((torch.zeros(1, 6, 4), torch.zeros(1, 6, 4)), torch.zeros(6, 3), {"state"}),
        ({"hidden": torch.zeros(6, 4)}, torch.zeros(6, 3), {"state"}),
        (torch.zeros(1, 5, 4), torch.zeros(7, 5), {"state"}),  # time first: the second dim has the rows
        (torch.zeros(1, 5, 4), torch.zeros(6, 3), set()),
        (torch.zeros(6), torch.zeros(6, 3), set()),
        (6, torch.zeros(6, 3), set()),
    ],
)
def test_an_attribute_with_as_many_entries_as_the_batch_has_rows(state, first, found):
    model = Recurrent()
    model.state = state
    assert names_with_rows(model, 6, first) == found
    assert keeps_tensors(model) == (not isinstance(state, int))


def test_the_model_s_own_tensors_in_a_container_are_no_state():
    """TensorDict keeps parameters in an attribute beside: passed as inputs they would be trained no more."""
    model = Recurrent()
    model.by_name = {"weight": model.cell.weight, "mean": model.mean}
    model.spare = [nn.Parameter(torch.zeros(6, 6))]
    assert names_with_rows(model, 6, torch.zeros(6, 3)) == set()
    assert not keeps_tensors(model)


def test_attributes_that_the_script_trains_are_those_of_each_module_around_them():
    model = nn.Sequential(nn.Sequential(Recurrent()), Recurrent())
    model[0][0].alphas = [torch.zeros(3, requires_grad=True), torch.zeros(3)]
    model[1].seen = torch.zeros(3)
    model[1].computed = torch.zeros(3, requires_grad=True) * 2
    model[1].own = [model[1].cell.weight]
    found = trained_attributes(model)
    assert found == {path: {"0.0.alphas"} for path in ("", "0", "0.0")}
    assert add_trained(found, "1.hidden", torch.ones(2, requires_grad=True)) and found["1"] == {"1.hidden"}
    assert not add_trained(found, "1.own", [model[1].cell.weight]) and "1.own" not in found[""]


def test_a_buffer_with_a_graph_is_passed_from_the_first_call_on():
    model = nn.Sequential(Recurrent(), Recurrent())
    assert trained_attributes(model) == {}
    model[1].mean = torch.zeros(6, requires_grad=True) * 2
    assert trained_attributes(model) == {path: {"1.mean"} for path in ("", "1")}
