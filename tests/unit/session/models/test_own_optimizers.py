"""Which optimizers step on the workers: what a trial finds, and what is refused."""

from __future__ import annotations

import random

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizers

from moreh_ap.session.models import optimizer_trial
from moreh_ap.session.models.known_optimizers import elementwise_optimizers
from moreh_ap.session.models.optimizer_trial import Refused
from moreh_ap.session.models.own_optimizers import own_step_of

CLIP = 1.0
SEEN: list[float] = []


class Plain(torch.optim.Optimizer):
    """Descends by a method that classes below replace."""

    def __init__(self, params, lr=0.1, **others):
        super().__init__(params, {"lr": lr, **others})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.sub_(group["lr"] * self.direction(parameter, group))

    def direction(self, parameter, group):
        return parameter.grad


class Clipped(Plain):
    def direction(self, parameter, group):
        return parameter.grad.clamp(-CLIP, CLIP)


class Normalized(Plain):
    def direction(self, parameter, group):
        return parameter.grad / parameter.grad.norm()


class NormalizedWhereLong(Plain):
    """By the root of the mean square, as it is nearly the same for parts of equal rows."""

    def direction(self, parameter, group):
        return parameter.grad / parameter.grad.square().mean().sqrt().clamp(min=1.0)


class Centralized(Plain):
    """Takes the mean over columns, so that it may step rows, but not columns."""

    def direction(self, parameter, group):
        return parameter.grad - parameter.grad.mean(-1, keepdim=True) if parameter.dim() > 1 else parameter.grad


class InBlocks(Plain):
    """Scales by the largest of every 64 elements, as optimizers with state of 8 bits do."""

    def direction(self, parameter, group):
        flat = torch.nn.functional.pad(parameter.grad.flatten(), (0, -parameter.numel() % 64)).view(-1, 64)
        return (flat / flat.abs().amax(1, keepdim=True)).flatten()[: parameter.numel()].view_as(parameter)


class Late(Plain):
    """Takes a mean over rows at every fourth step only."""

    def direction(self, parameter, group):
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        return parameter.grad.mean(0, keepdim=True) if state["step"] % 4 == 0 else parameter.grad


class Counts(Plain):
    """Counts steps in its groups and warms up by them, as optimizers of libraries do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step()

    def direction(self, parameter, group):
        return parameter.grad * min(1.0, group["step"] / 5)


class CountsUses(Plain):
    def direction(self, parameter, group):
        group["k"] = group.get("k", 0) + 1
        return parameter.grad


class FindsItsRate(Plain):
    """Estimates the distance to go from gradients that point the same way, as D-adaptation does."""

    def step(self, closure=None):
        for group in self.param_groups:
            found = sum((one.grad * (self.first(one) - one)).sum().item() for one in group["params"])
            group["d"] = max(group.get("d", 1e-6), found)
        super().step()

    def first(self, parameter):
        return self.state[parameter].setdefault("first", parameter.detach().clone())


class FromAShape(Plain):
    """Notes whether it has large parameters, as each of them is, and no small copy."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["large"] = any(max(parameter.shape) > 5 for parameter in group["params"])
        super().step()


class Rises(Plain):
    num_steps = 0

    def direction(self, parameter, group):
        self.num_steps += 1
        return parameter.grad


class Records(Plain):
    def direction(self, parameter, group):
        SEEN.append(parameter.grad.norm().item())
        return parameter.grad


class Prints(Plain):
    def direction(self, parameter, group):
        print("a step")
        return parameter.grad


class Draws(Plain):
    def direction(self, parameter, group):
        return parameter.grad * random.random()


class Noisy(Plain):
    def direction(self, parameter, group):
        return parameter.grad + torch.randn_like(parameter)


class OneCount(Plain):
    def direction(self, parameter, group):
        self.state["step"] = self.state.get("step", 0) + 1
        return parameter.grad


class KeepsAList(Plain):
    def direction(self, parameter, group):
        self.state[parameter]["history"] = [object()]
        return parameter.grad


class Holds(Plain):
    def __init__(self, params):
        super().__init__(params)
        self.others = [object()]


class Together(Plain):
    def direction(self, parameter, group):
        return parameter.grad / sum(one.grad.norm() for one in group["params"])


class WithClosure(Plain):
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        super().step()
        return loss


class Twice(Plain):
    """Steps before and after a closure, as a search along a line does."""

    def step(self, closure=None):
        super().step()
        loss = closure() if closure is not None else None
        super().step()
        return loss


class Ascends(Plain):
    """Changes parameters before the closure, past autograd's count of changes, as SAM does."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(0.01)
        loss = closure() if closure is not None else None
        super().step()
        return loss


class Answers(Plain):
    def step(self, closure=None):
        super().step()
        return 1.0


class AfterAdam(torch.optim.Adam):
    def step(self, closure=None):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.99)
        return super().step(closure)


def optimizer_of(kind, **how):
    model = nn.Sequential(nn.Embedding(300, 24), nn.Linear(24, 48), nn.Conv1d(4, 6, 3), nn.LayerNorm(24))
    return kind(model.parameters(), **how)


def found(optimizer):
    step = type(optimizer).step
    return own_step_of(optimizer, getattr(step, "__wrapped__", step))


@pytest.mark.parametrize("kind", elementwise_optimizers(), ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_optimizers_of_torch_that_are_known_step_their_shards(kind):
    assert not found(optimizer_of(kind)).needs_whole


@pytest.mark.parametrize("kind", [Plain, Clipped, Counts, AfterAdam])
def test_an_optimizer_that_computes_each_element_steps_its_shards(kind):
    own = found(optimizer_of(kind))
    assert not own.needs_whole
    assert issubclass(cloudpickle.loads(own.pickled_class), torch.optim.Optimizer)


@pytest.mark.parametrize("kind", [Normalized, NormalizedWhereLong, Centralized, InBlocks, Late, torch.optim.Adafactor])
def test_one_that_looks_at_rows_together_needs_whole_parameters(kind):
    assert found(optimizer_of(kind)).needs_whole


def test_steps_that_multiply_matrices_are_told_from_those_that_read_them():
    model = nn.Sequential(nn.Linear(24, 48, bias=False), nn.Linear(48, 24, bias=False))
    own = found(torch.optim.Muon(model.parameters()))
    assert own.needs_whole and own.multiplies
    assert not any(found(optimizer_of(kind)).multiplies for kind in (Plain, Normalized, torch.optim.Adafactor))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Together, "computes a parameter, or a setting of its groups, from other parameters"),
        (CountsUses, "computes a parameter, or a setting of its groups, from other parameters"),
        (FindsItsRate, "a setting of its groups, from other parameters"),
        (FromAShape, "computes the settings of its groups from parameters"),
        (Rises, "changes its own attributes"),
        (Records, "changes the variable SEEN"),
        (Prints, "prints"),
        (Draws, "draws random numbers"),
        (Noisy, "draws random numbers"),
        (OneCount, "keeps state that is not of a parameter"),
        (KeepsAList, "keeps 'history' of type list"),
        (Holds, "has an attribute others of type list"),
        (Answers, "returns something"),
        (torch.optim.LBFGS, "has an attribute _params"),
    ],
)
def test_one_that_does_more_is_refused(kind, why):
    optimizer, drawn = optimizer_of(kind), torch.get_rng_state()
    with pytest.raises(Refused, match=why):
        found(optimizer)
    assert not optimizer.state and torch.equal(drawn, torch.get_rng_state()) and not SEEN


def test_a_setting_that_is_an_object_is_refused():
    with pytest.raises(Refused, match="has 'schedule' of type dict in its groups"):
        found(optimizer_of(Plain, schedule={1: object()}))


def test_a_schedule_that_begins_with_zero_hides_nothing():
    assert found(optimizer_of(Normalized, lr=0.0)).needs_whole


def test_settings_that_a_step_changes_are_changed_in_the_script_too():
    optimizer = optimizer_of(Counts, lr=0.0)
    own = found(optimizer)
    assert "step" not in optimizer.param_groups[0]
    for number in range(1, 4):
        optimizer.param_groups[0]["lr"] = number / 10
        own.advance(optimizer)
        assert optimizer.param_groups[0]["step"] == number
        assert optimizer.param_groups[0]["lr"] == number / 10
    assert own.twin is not None and all(one.numel() <= 12 for one in own.twin.parameters)
    assert found(optimizer_of(Plain)).twin is None


def test_a_closure_that_is_called_once_and_first():
    assert found(optimizer_of(WithClosure)).takes_closure
    assert found(optimizer_of(torch.optim.Adam)).takes_closure
    assert not found(optimizer_of(Twice)).takes_closure  # before it, parameters have changed
    assert not found(optimizer_of(Ascends)).takes_closure
    assert not found(optimizer_of(Plain)).takes_closure  # it is ignored


def test_many_groups_with_the_same_shapes_are_not_all_tried():
    """As with a learning rate for each layer."""
    layers = [nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48)) for _ in range(20)]
    optimizer = Plain([{"params": layer.parameters(), "lr": 0.1 / (1 + at)} for at, layer in enumerate(layers)])
    trial = optimizer_trial.Trial(optimizer, Plain.step)
    assert len(trial._values) == 21 and set(trial._group_of) == set(range(20))
    assert {one.dim() for one in trial._values} == {1, 2}


def test_a_variable_that_changes_later_is_noticed(monkeypatch):
    optimizer = optimizer_of(Clipped)
    own = found(optimizer)
    own.check(optimizer)
    monkeypatch.setitem(globals(), "CLIP", 2.0)
    with pytest.raises(Refused, match="reads CLIP, which has changed"):
        own.check(optimizer)


def test_hooks_do_not_see_the_trial():
    seen = []
    optimizer = optimizer_of(AfterAdam)
    everyone = torch_optimizers.register_optimizer_step_post_hook(lambda *_: seen.append("of all"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("its own"))
    try:
        found(optimizer)
        assert not seen
        assert len(torch_optimizers._global_optimizer_post_hooks) == 1
    finally:
        everyone.remove()


def test_the_rows_of_a_trial_differ_in_size():
    values = optimizer_trial._drawn((100, 8), 2.0, torch.Generator().manual_seed(0))
    assert values[-10:].std() > 20 * values[:10].std()


@pytest.mark.parametrize("kind", [Clipped, Counts])
def test_a_parameter_without_a_dim_is_tried_too(kind):
    optimizer = kind([nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))])
    assert not found(optimizer).needs_whole


def test_lbfgs_over_parameters_without_dims_is_refused_with_its_reason():
    with pytest.raises(Refused):
        optimizer_trial.Trial(torch.optim.LBFGS([nn.Parameter(torch.tensor(2.0))]), torch.optim.LBFGS.step)
