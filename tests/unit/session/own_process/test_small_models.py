"""Which models run in the script's own process, and until when."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moreh_ap.device.host_tensors import HostTensor
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.plan import Plan
from moreh_ap.session.own_process import small_models
from moreh_ap.session.own_process.small_models import MAX_STEP_FLOPS, SmallModels
from moreh_ap.settings import Options


def on_accelerator(model):
    for part in model.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = nn.Parameter(parameter.detach().cuda())
    return model


@pytest.fixture
def model():
    return on_accelerator(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))


def small(options=None, device_type="cuda"):
    return SmallModels(SimpleNamespace(options=options or Options(), num_devices=2, device_type=device_type), {})


def call(rows):
    return (torch.zeros(rows, 4).cuda(),), {}


def test_a_small_model_is_taken_and_said_once(model, capsys):
    models = small()
    assert models.take(model, call(8)) and models.take(model, call(8))
    assert set(models._routes) == set(model.modules())
    assert capsys.readouterr().out.count("Sequential runs in this process: a step of 0.0028 MFLOP") == 1


@pytest.mark.parametrize(
    "options",
    [
        Options(plan=Plan.parse("replicate=2")),
        Options(autotune=True),
        Options(strict=True),
        Options(num_stages=2),
        Options(num_micro_batches=4),
        Options(pipeline_parallel=False),
        Options(activation_recomputation=True),
        Options(distribute_parameter=True),
    ],
)
def test_a_script_that_says_how_models_are_laid_out_has_them_on_the_workers(model, options):
    assert not small(options).take(model, call(8))
    assert small(replace(Options(), devices=8)).take(model, call(8))


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_a_large_call_is_not_small(model, device_type):
    rows = int(MAX_STEP_FLOPS[device_type] / small_models.step_flops_per_position(model))
    models = small(device_type=device_type)
    assert models.take(model, call(rows)) and not models.take(model, call(rows + 1))
    deep = on_accelerator(nn.Sequential(*(nn.Linear(2, 2) for _ in range(25))))
    assert not models.take(deep, ((torch.zeros(1, 2).cuda(),), {}))


def test_the_route_computes_until_a_call_is_large(model):
    models = small()
    models.take(model, call(8))
    route = models._routes[model]
    assert route(*call(8)).shape == (8, 2)
    assert route(*call(10**6)) is NotImplemented
    assert not models._routes, "the next call decides again"


def test_the_route_of_a_part_asks_only_if_the_script_calls_it(model):
    models = small()
    models.take(model, call(8))
    wide = ((torch.zeros(10**6, 4).cuda(),), {})
    assert models._routes[model[1]](*wide) is NotImplemented
    models.take(model, call(8))
    inside = []
    model[0].register_forward_hook(lambda *_: inside.append(models._routes[model[1]](*wide)))
    assert models._routes[model](*call(8)).shape == (8, 2)
    assert inside[0].shape == (10**6, 4) and models._routes


def test_a_model_whose_forwards_take_long_goes_to_the_workers(model, monkeypatch):
    monkeypatch.setitem(small_models.MAX_FORWARD_S, "cuda", 0.0)
    models = small()
    models.take(model, call(8))
    for _ in range(4):
        models._routes[model](*call(8))
    assert not models._routes and not models.take(model, call(8))
    assert all(type(parameter) is HostTensor for parameter in model.parameters())
    models.let_go(model)
    assert all(type(parameter) is VirtualTensor for parameter in model.parameters())


def test_a_part_that_outlives_its_model_is_a_model():
    models = small()
    lone = on_accelerator(nn.Sequential(nn.Linear(4, 8)))
    models.take(lone, call(8))
    part, route = lone[0], models._routes[lone[0]]
    models._routes.pop(lone)
    del lone
    gc.collect()
    assert route(*call(2)) is NotImplemented and part not in models._routes
