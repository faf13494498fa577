"""Calls of a model in this process on ordinary tensors: the numbers of a CPU, and when they are not used."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from moreh_ap.session.own_process import small_models
from moreh_ap.session.own_process.host_call import HostCalls
from moreh_ap.settings import Options

LOG: list = []


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.LSTM(4, 8, 2, batch_first=True, dropout=0.5), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.recurrent(x[:, None])[0])[:, 0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return {"out": self.second(self.first(x).tanh()), "count": self.num_calls, "none": None}


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))

    def forward(self, x):
        hidden = checkpoint(self.block, x.requires_grad_(), use_reentrant=True)
        return hidden + checkpoint(self.block, x, use_reentrant=False)


class OnDevice(nn.Module):
    """Makes a tensor on "cuda" where its parameter was said to be."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.layer, self.norm, self.device = nn.Linear(4, 3), nn.BatchNorm1d(3), device

    def forward(self, x):
        noise = F.dropout(self.norm(self.layer(x)), 0.5)
        return noise + torch.ones(3, device=self.device)


class Remembering(nn.Module):
    """Keeps what it computed: in an attribute, a list, or an object."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 3), None

    def forward(self, x):
        self.last = self.layer(x)
        return self.last * 2


class Collecting(Remembering):
    def __init__(self):
        super().__init__()
        self.all = []

    def forward(self, x):
        self.all.append(self.layer(x))
        return self.all[-1] * 2


class Box:
    value = None


class Boxing(Remembering):
    def __init__(self):
        super().__init__()
        self.box = Box()

    def forward(self, x):
        self.box.value = self.layer(x)
        return self.box.value * 2


class Caching(Remembering):
    """Makes a buffer and an attribute at its third call."""

    def forward(self, x):
        if self.last is None:
            self.last = 0
        self.last += 1
        if self.last > 2 and not hasattr(self, "scale"):
            self.register_buffer("scale", x.new_full((3,), 2.0))
            self.shift = x.new_full((3,), 0.5)
        return self.layer(x) * getattr(self, "scale", 1.0) + getattr(self, "shift", 0.0)


class Filling(nn.Module):
    """Changes what it is given, a dict, and a parameter."""

    def __init__(self):
        super().__init__()
        self.layer, self.average = nn.Linear(4, 3), nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x):
        box = x if isinstance(x, dict) else {"x": x}
        box["hidden"] = self.layer(box["x"])
        with torch.no_grad():
            self.average.lerp_(box["hidden"].mean(0), 0.5)
        return box["hidden"] - self.average


class Logging(Remembering):
    def forward(self, x):
        LOG.append(self.layer(x))
        return LOG[-1] * 2


@dataclasses.dataclass
class Config:
    scale: float = 2.0


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.layer = Config(), nn.Linear(4, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x, shift=None):
        hidden = F.dropout(self.layer(x), 0.5, self.training) * self.config.scale
        return hidden + (self.shift if shift is None else shift)


ORDINARY = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)),
    "recurrent": Recurrent,
    "tied": Tied,
    "checkpointed": Checkpointed,
    "configured": Configured,
}
BY_THEMSELVES = {
    "attribute": Remembering,
    "list": Collecting,
    "object": Boxing,
    "global": Logging,
    "third call": Caching,
}


class Script:
    """A model with `HostCalls` on the accelerator, or an ordinary one on the CPU."""

    def __init__(self, make, device):
        torch.manual_seed(0)
        self.model, self.device = make(), device
        if device == "cuda":
            for part in self.model.modules():
                for held in (part._parameters, part._buffers):
                    for name, tensor in held.items():
                        moved = tensor.detach().cuda()
                        is_parameter = held is part._parameters
                        held[name] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
                if hasattr(part, "flatten_parameters"):
                    part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
            if isinstance(self.model, Tied):
                self.model.second.weight = self.model.first.weight
        self.calls = HostCalls(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def __call__(self, *args, **kwargs):
        if self.device == "cpu":
            return self.model(*args, **kwargs)
        return self.calls.run(self.model, args, kwargs)

    def batch(self, seed):
        return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(self.device)


def train(make, device):
    LOG.clear()
    script = Script(make, device)
    losses = []
    for step in range(4):
        result = script(script.batch(step))
        loss = (result["out"] if isinstance(result, dict) else result).pow(2).mean()
        loss.backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
        losses += [loss.item(), torch.rand(()).item()]
    losses += [float(buffer.sum()) for buffer in script.model.buffers()]
    return losses, script


@pytest.mark.parametrize("name", [*ORDINARY, *BY_THEMSELVES])
def test_training_has_the_numbers_of_ordinary_tensors(name):
    make = (ORDINARY | BY_THEMSELVES)[name]
    losses, script = train(make, "cuda")
    assert losses == train(make, "cpu")[0]
    assert all(parameter.is_cuda for parameter in script.model.parameters())
    assert script.calls._is_refused == (name in ("global", "third call"))
    assert any(script.calls._tried.values()) == (name in ORDINARY or name == "third call")


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_what_a_forward_leaves_is_on_the_accelerator(name):
    _, script = train(BY_THEMSELVES[name], "cuda")
    model = script.model
    left = {"attribute": "last", "list": "all", "object": "box", "third call": "shift"}.get(name)
    kept = LOG if left is None else getattr(model, left)
    for one in kept if isinstance(kept, list) else [getattr(kept, "value", kept)]:
        assert one.is_cuda and (one.grad_fn is not None or name == "third call")
    assert name not in ("list", "global") or len(kept) == 4


def test_a_forward_that_makes_tensors_on_the_accelerator_runs_again():
    losses, script = train(lambda: OnDevice("cuda"), "cuda")
    assert losses == train(OnDevice, "cpu")[0]
    assert script.calls._is_refused


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_in_place_operations_on_results(device):
    script = Script(ORDINARY["layers"], device)
    for _ in range(3):
        result = script(script.batch(0))
        result += 1
        result[0].mul_(2)
        result.sum().backward()
    squashed = Script(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), device)
    for _ in range(3):
        result = squashed(squashed.batch(0))
        result.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def penalties(device):
    script = Script(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), device)
    found = []
    for step in range(3):
        x = script.batch(step).requires_grad_()
        result = script(x)
        (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).pow(2).mean() + x.mean() + result.mean()
        penalty.backward()
        gradients = [x.grad, *(parameter.grad for parameter in script.model.parameters())]
        found += [penalty.item(), *(float(one.sum()) for one in gradients if one is not None)]
        script.optimizer.step()
        script.optimizer.zero_grad()
    return found


def test_gradients_of_gradients():
    assert penalties("cuda") == pytest.approx(penalties("cpu"), rel=1e-6)


def test_a_graph_is_kept_as_long_as_the_script_asks():
    script = Script(ORDINARY["configured"], "cuda")
    for _ in range(2):
        script.optimizer.zero_grad()
        loss = script(script.batch(0)).sum()
        loss.backward(retain_graph=True)
        once = script.model.layer.weight.grad.clone()
        loss.backward()
        assert torch.equal(script.model.layer.weight.grad, 2 * once)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_a_weight_changed_before_backward_is_noticed():
    script = Script(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), "cuda")
    for _ in range(2):
        loss = script(script.batch(0)).sum()
        with torch.no_grad():
            script.model[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_results_that_are_views_or_on_the_cpu_stay_what_they_are():
    class Views(nn.Linear):
        def forward(self, x):
            return x[:, :2], super().forward(x)

    class ToHost(nn.Linear):
        def forward(self, x):
            return super().forward(x).cpu()

    views = Script(lambda: Views(4, 3), "cuda")
    for _ in range(3):
        x = views.batch(0)
        views(x)[0].zero_()
        assert x[:, :2].abs().sum() == 0
    to_host = Script(lambda: ToHost(4, 3), "cuda")
    assert not any(to_host(to_host.batch(0)).is_cuda for _ in range(3))


def filled(device):
    script, found = Script(Filling, device), []
    for step in range(4):
        box = {"x": script.batch(step)}
        script(box).sum().backward()
        found += [box["hidden"].sum().item(), script.model.average.sum().item()]
        assert box["hidden"].device == box["x"].device
    return found


def test_a_dict_that_a_forward_fills_is_the_script_s():
    assert filled("cuda") == filled("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_blocks_that_the_script_has_computed_again(device):
    script = Script(ORDINARY["layers"], device)
    for reentrant in (False, True, False, True):
        hidden = script.batch(0).requires_grad_()
        checkpoint(script, hidden, use_reentrant=reentrant).sum().backward()
        assert hidden.grad.abs().sum() > 0
        script(script.batch(1)).sum().backward()


def test_a_part_that_outlives_its_model_is_a_model():
    models = small_models.SmallModels(SimpleNamespace(options=Options(), num_devices=2, device_type="cpu"), {})
    script = Script(ORDINARY["layers"], "cuda")
    models.take(script.model, ((script.batch(0),), {}))
    part = script.model[0]
    route = models._routes[part]
    models._routes.pop(script.model)
    del script
    gc.collect()
    assert route((torch.zeros(2, 4).cuda(),), {}) is NotImplemented
    assert part not in models._routes


def test_hooks_see_tensors_on_the_accelerator():
    script = Script(ORDINARY["layers"], "cuda")
    script(script.batch(0))
    seen = []
    script.model[0].register_forward_hook(lambda module, args, output: seen.append(output.is_cuda))
    for _ in range(2):
        script(script.batch(0))
    assert seen == [True, True]


def test_an_error_of_the_script_is_that_of_the_accelerator_and_changes_nothing():
    script = Script(ORDINARY["layers"], "cuda")
    for _ in range(2):
        script(script.batch(0))
    mean, state = script.model[1].running_mean.clone(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        script(script.batch(0)[:, :2])
    assert torch.equal(script.model[1].running_mean, mean) and torch.equal(torch.get_rng_state(), state)
    assert script.calls.are_on_ordinary_tensors


def test_a_model_is_freed_with_its_calls():
    script = Script(ORDINARY["layers"], "cuda")
    for _ in range(2):
        script(script.batch(0)).sum().backward()
    model, calls = weakref.ref(script.model), script.calls
    del script
    gc.collect()
    assert model() is None and calls is not None
