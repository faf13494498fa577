"""Steps of optimizers on parameters whose values are in this process."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from moreh_ap.session.own_process.host_step import step_on_values

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
}


def _parameters(device):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(3, 2, generator=generator), torch.randn(2, generator=generator), torch.randn(())]
    values[2].fill_(0.5)
    return [torch.nn.Parameter(value.to(device)) for value in values]


def _groups(parameters):
    return [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:]}]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_and_state_are_those_of_ordinary_tensors(name):
    expected, ours = _parameters("cpu"), _parameters("cuda")
    reference, optimizer = OPTIMIZERS[name](_groups(expected)), OPTIMIZERS[name](_groups(ours))
    for factor in (1.0, -2.0, 3.0):
        for parameters in (expected, ours):
            (parameters[0].sum() ** 2 * factor + parameters[2] * 3).backward()  # the second has no gradient
        reference.step()
        assert step_on_values(optimizer, type(optimizer).step.__wrapped__)
    assert all(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])
    for parameter, wanted in zip(ours, expected):
        assert torch.allclose(parameter.cpu(), wanted)
        state, wanted_state = optimizer.state.get(parameter, {}), reference.state.get(wanted, {})
        assert state.keys() == wanted_state.keys()
        for key, value in wanted_state.items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(state[key].cpu(), value)
                assert state[key].is_cuda == (key != "step")
    assert copy.deepcopy(optimizer.state_dict())["state"].keys() == reference.state_dict()["state"].keys()


def test_autograd_notices_a_parameter_that_a_step_changed():
    weight = torch.nn.Parameter(torch.ones(2, 2).cuda())
    loss = (weight @ weight).sum()
    loss.backward(retain_graph=True)
    assert step_on_values(torch.optim.SGD([weight], lr=0.1), torch.optim.SGD.step)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_of_a_script_see_the_step_on_accelerator_tensors():
    weight = torch.nn.Parameter(torch.ones(2).cuda())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    assert not step_on_values(optimizer, torch.optim.SGD.step)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert not step_on_values(plain, torch.optim.SGD.step)


@pytest.mark.parametrize("unscales_first", [False, True])
def test_a_scaler_s_factor_reaches_a_fused_step(unscales_first, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # else a scaler does nothing
    expected, ours = _parameters("cpu"), _parameters("cuda")
    for device, parameters in (("cpu", expected), ("cuda", ours)):
        optimizer = torch.optim.SGD(_groups(parameters), lr=0.1, momentum=0.9, fused=True)
        scaler = torch.amp.GradScaler(device, init_scale=64.0)
        for factor in (1.0, float("inf"), 3.0):  # the second step is skipped
            optimizer.zero_grad()
            scaler.scale(parameters[0].sum() ** 2 * factor).backward()
            if unscales_first:
                scaler.unscale_(optimizer)
            if device == "cpu":
                scaler.step(optimizer)
            else:
                original = type(optimizer).step.__wrapped__
                optimizer.step = functools.partial(step_on_values, optimizer, original)
                scaler.step(optimizer)
                del optimizer.step
            scaler.update()
    for parameter, wanted in zip(ours, expected):
        assert torch.allclose(parameter.cpu(), wanted)
