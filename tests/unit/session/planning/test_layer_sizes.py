"""What layers of models with convolutions read and write, and that nobody notices how it was found."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moreh_ap.session.planning import layer_sizes as module
from moreh_ap.session.planning.layer_sizes import layer_sizes
from moreh_ap.session.planning.model_profiling import profile_model

PICTURES = torch.zeros(4, 3, 16, 16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 32, 3, stride=4, padding=1)
        self.up = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.head = nn.Linear(8, 5)
        self.calls, self.seen, self.heads, self.named = 0, [], [torch.ones(1)], {"last": 0}

    def forward(self, x):
        print("called")
        self.calls += 1
        self.seen.append(x.shape)
        self.heads[0], self.named["last"] = x, x
        self.last = self.deep(F.relu(self.norm(self.stem(x))))
        random.random()
        return self.head(F.dropout(self.up(self.last)).mean((2, 3)) + torch.rand(()))


def sizes_by_name(root, *args, **kwargs):
    found = layer_sizes(root, root, args, kwargs)
    return {name: (found[id(part)].read, found[id(part)].written) for name, part in root.named_modules() if name}


def test_sizes_are_those_of_the_forward():
    assert sizes_by_name(Net(), PICTURES) == {
        "stem": (4 * 3 * 16 * 16, 4 * 8 * 8 * 8),
        "norm": (4 * 8 * 8 * 8, 4 * 8 * 8 * 8),
        "deep": (4 * 8 * 8 * 8, 4 * 32 * 2 * 2),
        "up": (4 * 32 * 2 * 2, 4 * 8 * 4 * 4),
        "head": (4 * 8, 4 * 5),
    }


def test_models_and_calls_on_the_accelerator_are_run_too():
    net = Net()
    for part in net.modules():
        for held in (part._parameters, part._buffers):
            held.update({name: None if one is None else type(one)(one.detach().cuda()) for name, one in held.items()})
    assert len(sizes_by_name(net, x=PICTURES.cuda())) == 5


def test_nothing_of_the_run_is_left(capsys):
    net = Net()
    before, members = net.state_dict(), dict(vars(net))
    values = {name: value.clone() for name, value in before.items()}
    stream, chance = torch.get_rng_state(), random.getstate()
    assert layer_sizes(net, net, (PICTURES,), {})
    assert capsys.readouterr().out == ""
    assert vars(net) == members and net.calls == 0 and net.seen == []
    assert net.heads == [torch.ones(1)] and net.named == {"last": 0}
    assert net.state_dict().keys() == before.keys() and not net.stem._forward_hooks
    assert all(torch.equal(value, values[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream) and random.getstate() == chance


class Reads(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) if x.sum().item() < 1e9 else x


LOG = []


class Writes(nn.Conv2d):
    def forward(self, x):
        LOG.append(1)
        return super().forward(x)


def hooked():
    net = nn.Sequential(nn.Conv2d(3, 8, 3))
    net.register_forward_hook(lambda part, args, result: LOG.append(2))
    return net


@pytest.mark.parametrize("make", [lambda: Reads(3, 8, 3), lambda: Writes(3, 8, 3), hooked])
def test_forwards_that_need_values_or_may_be_noticed_tell_nothing(make):
    net = make()
    assert layer_sizes(net, net, (PICTURES,), {}) == {} and LOG == []


def test_hooks_that_the_forward_puts_on_modules_are_taken_off():
    """As those of transformers that collect hidden states: with the mark gone and the hooks left, they come twice."""

    class Collects(nn.Sequential):
        def forward(self, x):
            if not getattr(self, "is_hooked", False):
                self.is_hooked = True
                self[0].register_forward_hook(lambda part, args, output: None, with_kwargs=False)
                self[0].register_forward_pre_hook(lambda part, args, kwargs: None, with_kwargs=True)
            return super().forward(x)

    model = Collects(nn.Conv1d(2, 3, 3))
    assert layer_sizes(model, model, (torch.zeros(1, 2, 8),), {})
    assert not hasattr(model, "is_hooked")
    part = model[0]
    assert not any([part._forward_hooks, part._forward_pre_hooks, part._forward_pre_hooks_with_kwargs])


def test_models_without_convolutions_are_not_run(monkeypatch):
    monkeypatch.setattr(module, "_noting", None)
    net = nn.Linear(3, 4)
    assert layer_sizes(net, net, (torch.zeros(2, 3),), {}) == {}


class Residual(nn.Module):
    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(channels // stride, channels, 3, stride, 1, bias=False)
        self.short = nn.Conv2d(channels // stride, channels, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.short(x))


def test_the_profile_of_a_deep_network_has_the_operations_of_its_forward():
    net = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), Residual(32, 2), Residual(64, 2), nn.Conv2d(64, 64, 1, groups=4))
    found = profile_model(net, None, (net, (PICTURES,), {}), 4)
    macs = 64 * 16 * 3 * 49 + 16 * 32 * 16 * (9 + 1) + 4 * 64 * 32 * (9 + 1) + 4 * 64 * 16
    segments = [found.first, *[found.block] * found.num_blocks, found.last]
    assert 256 * sum(one.product_flops_per_token for one in segments) == pytest.approx(2 * macs)


class Vision(nn.Module):
    """A patch embedding, and attention that uses the weight of a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))


def test_layers_of_a_vision_transformer_see_its_patches_and_not_its_pixels():
    net = Vision()
    found = profile_model(net, None, (net, (PICTURES,), {}), 4)
    macs = 16 * 32 * 3 * 16 + 16 * 32 * 96 + 16 * 32 * 32 + 32 * 10
    assert 256 * found.block.product_flops_per_token == pytest.approx(2 * macs)


def test_parts_that_are_not_called_count_by_the_positions_of_the_call():
    parts = nn.ModuleDict({"net": Vision(), "other": nn.Linear(32, 16)})
    found = profile_model(parts, None, (parts["net"], (PICTURES,), {}), 4)
    alone = profile_model(parts["net"], None, (parts["net"], (PICTURES,), {}), 4)
    more = found.block.product_flops_per_token - alone.block.product_flops_per_token
    assert more == pytest.approx(2 * 32 * 16)


def test_weights_computed_by_a_parametrization_are_no_products_of_their_own():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 1)), nn.Flatten(), nn.Linear(2048, 4))
    found = profile_model(net, None, (net, (PICTURES,), {}), 4)
    assert all(product.share > 0 for product in found.block.products)
    assert found.block.product_flops_per_token > 0
