"""The old AdamW against its rule written out in plain Python, number by number."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from moreh_ap.errors import OptionError, UnsupportedError
from moreh_ap.integrations.adamw import AdamW


def reference(value, grads, *, lr, betas, eps, weight_decay, correct_bias):
    """Returns the value of one parameter element after these gradients, in Python floats (float64)."""
    first = second = 0.0
    for step, grad in enumerate(grads, 1):
        first = betas[0] * first + (1 - betas[0]) * grad
        second = betas[1] * second + (1 - betas[1]) * grad * grad
        size = lr
        if correct_bias:
            size = lr * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)
        value = value - size * first / (math.sqrt(second) + eps)
        value = value - lr * weight_decay * value
    return value


def run(values, grads, **settings):
    """Returns the parameter [n] after one step for each row of grads [steps, n]."""
    parameter = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))
    optimizer = AdamW([parameter], **settings)
    for row in grads:
        parameter.grad = torch.tensor(row, dtype=torch.float64)
        optimizer.step()
    return parameter.detach()


def test_defaults():
    defaults = {name: p.default for name, p in inspect.signature(AdamW).parameters.items()}
    assert (defaults["lr"], defaults["betas"], defaults["eps"]) == (1e-3, (0.9, 0.999), 1e-6)
    assert (defaults["weight_decay"], defaults["correct_bias"]) == (0.0, True)


@pytest.mark.parametrize("correct_bias", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_rule(weight_decay, correct_bias):
    settings = {
        "lr": 3e-2,
        "betas": (0.8, 0.95),
        "eps": 1e-4,
        "weight_decay": weight_decay,
        "correct_bias": correct_bias,
    }
    values = [1.0, -2.0, 0.25]
    grads = [[0.5, -1e-5, 3.0], [-0.25, 2e-5, 1.0], [0.0, 1e-4, -7.0], [1.5, 0.0, 0.125]]
    got = run(values, grads, **settings)
    for index, value in enumerate(values):
        want = reference(value, [row[index] for row in grads], **settings)
        assert got[index].item() == pytest.approx(want, rel=1e-14)


def test_first_step_in_closed_form():
    root = math.sqrt(1e-3 * 1e-10)  # of the second moment, for a gradient of 1e-5
    want = 1.0 - 1e-3 * math.sqrt(1e-3) / 0.1 * 1e-6 / (root + 1e-6)
    assert run([1.0], [[1e-5]])[0].item() == pytest.approx(want, rel=1e-15)


def test_epsilon_comes_before_bias_correction():
    ours = run([1.0], [[1e-5]])
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    other = torch.optim.AdamW([parameter], lr=1e-3, eps=1e-6, weight_decay=0.0)
    parameter.grad = torch.full((1,), 1e-5, dtype=torch.float64)
    other.step()
    assert 1.0 - ours.item() < 0.5 * (1.0 - parameter.item())


def test_parameter_without_gradient_stays():
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([used, unused], weight_decay=0.5)
    used.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(unused.detach(), torch.ones(2))
    assert not torch.equal(used.detach(), torch.ones(2))


def test_state_dict_continues_exactly():
    torch.manual_seed(0)
    grads = torch.randn(6, 5)
    straight, first, second = (torch.nn.Parameter(torch.ones(5)) for _ in range(3))
    optimizer = AdamW([straight], weight_decay=0.01)
    for grad in grads:
        straight.grad = grad.clone()
        optimizer.step()
    optimizer = AdamW([first], weight_decay=0.01)
    for grad in grads[:3]:
        first.grad = grad.clone()
        optimizer.step()
    second.data.copy_(first.data)
    resumed = AdamW([second])
    resumed.load_state_dict(optimizer.state_dict())
    for grad in grads[3:]:
        second.grad = grad.clone()
        resumed.step()
    assert torch.equal(second.detach(), straight.detach())


def test_groups_schedule_and_closure():
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = AdamW([{"params": [a]}, {"params": [b], "lr": 0.0}], lr=0.1, eps=0.0, no_deprecation_warning=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert optimizer.step(lambda: (a + b).sum().backward() or 7.0) == 7.0
    schedule.step()
    assert (a.item(), b.item()) == (pytest.approx(0.9, rel=1e-6), 1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.0]


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1e-8}])
def test_wrong_settings(settings):
    with pytest.raises(OptionError, match=next(iter(settings))):
        AdamW([torch.nn.Parameter(torch.ones(1))], **settings)


def test_sparse_gradient_is_refused():
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse"):
        AdamW(embedding.parameters()).step()
