"""Models that are tried in float64, and are afterwards what they were."""

from __future__ import annotations

import torch
from torch import nn

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.statistics.float64_trial import in_float64, may_run_in_float64, to_float64


def test_parameters_and_buffers_are_put_back():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, labels = to_float64((torch.randn(5, 3), torch.arange(5)))
    with in_float64(model):
        output = model(x)
        output.sum().backward()
        assert output.dtype == model[1].running_mean.dtype == torch.float64 and labels.dtype == torch.int64
        model[1].num_batches_tracked.zero_()
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) and value.dtype == before[name].dtype


def test_models_in_other_precisions_are_not_tried():
    cpu = torch.device("cpu")
    assert may_run_in_float64(Call(nn.Linear(2, 2), "unsplit", cpu, axis=None))
    assert not may_run_in_float64(Call(nn.Linear(2, 2).bfloat16(), "unsplit", cpu, axis=None))
    assert not may_run_in_float64(Call(nn.Linear(2, 2), "unsplit", cpu, axis=None, autocast=torch.bfloat16))
