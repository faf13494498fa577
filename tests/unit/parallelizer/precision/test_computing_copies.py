"""Copies that stand in place of parameters during a forward: which, until when, and what their gradients become."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from moreh_ap.parallelizer.data.recompute import apply_recompute
from moreh_ap.parallelizer.precision.computing_copies import compute_in, computes_on_copies

LOW = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.seen = (self.layer.weight.dtype, x.dtype, mask.dtype if mask is not None else None, self.scale.dtype)
        return x + self.scale.to(x.dtype) * self.layer(x).relu()


class Model(nn.Module):
    """Tied weights, a frozen layer, blocks, and a layer that keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.fails = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.frozen(self.words(ids))
        self.dtypes = {one.dtype for one in self.parameters()}
        if self.fails:
            raise RuntimeError("on the way")
        for block in self.blocks:
            x = block(x, mask=torch.ones(2))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        result: Tensor = self.head(self.recurrent(x)[0])
        return result


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def ids() -> Tensor:
    return torch.randint(0, 12, (3, 4), generator=torch.Generator().manual_seed(1))


def with_copies(model: Model) -> Model:
    scales = [block.scale for block in model.blocks]
    compute_in(model, LOW, list(model.blocks), [model.norm], scales)
    return model


def by_hand(model: Model) -> tuple[Tensor, dict[str, Tensor]]:
    """The same with a model whose parameters are in bfloat16."""
    low = copy.deepcopy(model).to(LOW)
    for block in low.blocks:
        block.scale.data = block.scale.data.float()
    low.norm.float()
    result = low(ids())
    result.float().square().sum().backward()
    return result, {name: one.grad for name, one in low.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_forward_computes_in_the_dtype_and_gradients_are_those_of_the_parameters(model, recompute):
    wanted, gradients = by_hand(model)
    apply_recompute(list(model.blocks), recompute)
    with_copies(model)
    result = model(ids())
    assert result.dtype == LOW and torch.equal(result, wanted)
    assert all(block.seen == (LOW, LOW, LOW, torch.float32) for block in model.blocks)
    result.float().square().sum().backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert found.keys() == gradients.keys() and "frozen.weight" not in found
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32, name
        assert torch.equal(gradient, gradients[name].float()), name


def test_parameters_are_back_after_a_forward_and_after_one_that_raises(model):
    before = dict(model.named_parameters())
    addresses = {name: one.data_ptr() for name, one in before.items()}
    with_copies(model)
    model(ids())
    model.fails = True
    with pytest.raises(RuntimeError, match="on the way"):
        model(ids())
    assert model.dtypes == {LOW, torch.float32}  # scales and the normalisation
    model.fails = False
    assert torch.isfinite(model(ids())).all()
    after = dict(model.named_parameters())
    assert all(after[name] is one and one.data_ptr() == addresses[name] for name, one in before.items())
    assert all(map(lambda one, other: one is other, model.recurrent._flat_weights, model.recurrent.parameters()))


def test_gradients_of_several_backwards_are_added_up_in_float32(model):
    with_copies(model.eval())
    one = model(ids()).float().square().sum()
    one.backward()
    gradient = model.words.weight.grad.clone()
    model(ids()).float().square().sum().backward()
    assert torch.equal(model.words.weight.grad, gradient + gradient)


def test_without_gradients_no_history_is_kept(model):
    with_copies(model)
    with torch.no_grad():
        assert not model(ids()).requires_grad


def test_a_parameter_frozen_later_gets_no_gradient(model):
    with_copies(model)
    model.head.weight.requires_grad_(False)
    model(ids()).float().square().sum().backward()
    assert model.head.weight.grad is None and model.recurrent.weight_ih_l0.grad is not None


def test_a_model_that_calls_itself_has_one_copy_of_each_parameter(model):
    class Twice(Model):
        depth = 0

        def forward(self, ids: Tensor) -> Tensor:
            if self.depth:
                return super().forward(ids)
            self.depth, before = 1, self.words.weight
            result = self(ids)
            assert self.words.weight is before
            self.depth = 0
            return result

    twice = with_copies(Twice())
    twice(ids()).float().sum().backward()
    assert twice.words.weight.dtype == torch.float32 and twice.words.weight.grad.dtype == torch.float32


def test_the_memory_format_of_a_kernel_stays(model):
    layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    seen = []
    compute_in(layer, LOW, [], [], [])
    layer.register_forward_pre_hook(lambda layer, args: seen.append(layer.weight.stride()))
    layer(torch.ones(1, 3, 5, 5))
    assert seen == [layer.weight.stride()]


def test_it_is_known_of_the_module(model):
    assert not computes_on_copies(model) and computes_on_copies(with_copies(model))
