"""Which objects of a script are in its automatic checkpoints, and their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR, StepLR

from moreh_ap.errors import UnsupportedError
from moreh_ap.session.checkpoint.script_state import find


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def sgd(*modules):
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)


def test_one_of_each_has_no_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = sgd(model)
    schedule = StepLR(optimizer, 1)
    state = find([optimizer])
    assert state.model is model and state.optimizer is optimizer
    assert state.extra == {"scheduler": schedule.state_dict()}


def test_a_model_is_the_outermost_module_that_the_script_keeps():
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    dropped = Wrapper(model)
    dropped.itself = [dropped]  # a cycle: it lives until garbage is collected
    del dropped
    assert find([optimizer]).model is model
    kept = Wrapper(model)
    assert find([optimizer]).model is kept


def test_several_have_the_names_of_classes():
    first, second, other = nn.Linear(2, 2), nn.Linear(2, 2), Wrapper(nn.Linear(2, 2))
    optimizers = [sgd(first), sgd(other, second), sgd(nn.Sequential(second))]
    schedules = [ExponentialLR(optimizers[0], 0.5), StepLR(optimizers[0], 1)]
    state = find(optimizers)
    assert dict(state.model) == {"Linear": first, "Wrapper": other, "Linear2": second}
    assert dict(state.optimizer) == {"Linear": optimizers[0], "Wrapper": optimizers[1], "Linear2": optimizers[2]}
    assert state.extra == {
        "scheduler": {"Linear": schedules[0].state_dict(), "Linear StepLR": schedules[1].state_dict()}
    }


def test_a_schedule_of_schedules_is_one():
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    schedule = SequentialLR(optimizer, [ConstantLR(optimizer), ExponentialLR(optimizer, 0.9)], [2])
    assert find([optimizer]).extra["scheduler"].keys() == schedule.state_dict().keys()


def test_a_parameter_of_no_module_is_told():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(UnsupportedError, match=r"shape \(3,\) is in no module"):
        find([optimizer])
