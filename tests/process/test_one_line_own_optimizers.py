"""Optimizers of the script: the numbers of one device, by steps of the workers where these can take them."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from one_line_models import OwnTransformer
from own_optimizers import (
    IN_SCRIPT,
    ON_WORKERS,
    Columns,
    CountingAdam,
    CountingMuon,
    DecayedAdam,
    HalvedSGD,
    Lamb,
    Lion,
    Muon,
    Rows,
)
from rotating import rotating_from
from test_one_line_training import assert_same, batches, on_both

import moreh_ap
from moreh_ap.device import disable
from moreh_ap.protocol.messages.optimizers import StepOptimizer
from moreh_ap.session.session import Session

PLANS = rotating_from(1, ["replicate=2", "shard=2"])
MORE_PLANS = rotating_from(0, ["tensor=2", "pipeline=2,micro_batches=2", "shard=2,tensor=2"])


def train(device: str, kind: type[torch.optim.Optimizer], num_steps: int = 6, **how: Any) -> Any:
    """Losses of training with a schedule and two groups, the weights and the state."""
    torch.manual_seed(0)
    model = OwnTransformer().to(device)
    parameters = list(model.parameters())
    optimizer = kind([{"params": parameters[::2], "lr": 3e-3}, {"params": parameters[1::2]}], **how)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=4)
    losses = []
    for ids, labels in batches(device, count=num_steps):
        loss = model(ids, labels)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    state = {key: dict(entries) for key, entries in optimizer.state_dict()["state"].items()}
    steps = [group.get("step", 0) for group in optimizer.param_groups]
    return losses, model.state_dict(), state, steps, getattr(optimizer, "num_steps", 0)


def of_last(sent: list[Any]) -> int:
    """Returns how many of the steps are of the optimizer that stepped last: others verify the plan before."""
    return sum(step.owner == sent[-1].owner for step in sent) if sent else 0


def steps_sent(session: Session) -> list[Any]:
    """Returns a list to which steps that the workers are told to take are added."""
    sent: list[Any] = []
    session.outbox.on_sent = lambda commands, posted: sent.extend(
        command for command in commands if isinstance(command, StepOptimizer)
    )
    return sent


@pytest.mark.parametrize("plan", [*PLANS, *MORE_PLANS])
@pytest.mark.parametrize("kind", rotating_from(2, ON_WORKERS), ids=lambda kind: kind.__name__)
def test_workers_step(accelerator, plan, kind):
    sent = steps_sent(accelerator(plan))
    assert_same(*on_both(lambda device: train(device, kind)), rtol=1e-4, atol=2e-5)
    assert of_last(sent) == 6


@pytest.mark.rotating  # one more optimizer each
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", IN_SCRIPT, ids=lambda kind: kind.__name__)
def test_what_workers_cannot_step_is_right(accelerator, plan, kind, capfd):
    sent = steps_sent(accelerator(plan))
    assert_same(*on_both(lambda device: train(device, kind)), rtol=1e-4, atol=2e-5)
    assert of_last(sent) == (6 if kind is CountingAdam else 0)  # the step of Adam that its own step calls
    assert f"{kind.__name__} steps in the script's process" in capfd.readouterr().out


@pytest.mark.parametrize("plan", PLANS)
def test_steps_that_multiply_matrices_are_dealt_to_the_workers(accelerator, plan):
    """Each parameter is stepped by one worker, also where one has none; settings go on alike on all of them."""
    accelerator(plan)

    def script(device: str) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).to(device)
        weights, processes = [model[0].weight, model[2].weight], set()
        optimizer = CountingMuon(weights)
        for at, (x, y) in enumerate(zip(torch.randn(5, 8, 6), torch.randn(5, 8, 4))):
            for parameter in model.parameters():
                parameter.requires_grad_(parameter is weights[1] or (parameter is weights[0] and at > 2))
            optimizer.zero_grad()
            (model(x.to(device)) - y.to(device)).square().mean().backward()
            optimizer.step()
            processes |= {entries.pop("process") for entries in optimizer.state_dict()["state"].values()}
        number = len(processes - {os.getpid()})
        return model.state_dict(), optimizer.state_dict()["state"][0]["momentum"], number if device == "cuda" else 2

    assert_same(*on_both(script), rtol=1e-4, atol=2e-5)


def test_what_the_step_of_one_worker_raises(accelerator):
    """The worker whose parameter it is stops with the script's error, the others do not wait for it."""
    accelerator("replicate=2")
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)).to("cuda")
    optimizer = CountingMuon([model[0].weight, model[1].weight])
    model(torch.randn(8, 6, device="cuda")).square().mean().backward()
    optimizer.step()
    before = model[1].weight.detach().cpu()
    model[1].weight.grad.mul_(1e12)
    with pytest.raises(FloatingPointError, match="a gradient is too large"):
        optimizer.step()
        torch.cuda.synchronize()
    optimizer.zero_grad()
    model(torch.randn(8, 6, device="cuda")).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight.detach().cpu(), before)


@pytest.mark.rotating  # one more optimizer each
@pytest.mark.parametrize("kind", [Lion, Muon, Rows, Columns, Lamb, HalvedSGD], ids=lambda kind: kind.__name__)
def test_a_checkpoint_of_one_plan_goes_on_under_another(accelerator, tmp_path: Path, kind):
    def run(device: str, num_steps: int, folder: Path | None, to: Path | None = None) -> list[float]:
        torch.manual_seed(0)
        model = OwnTransformer().to(device)
        optimizer = kind(model.parameters())
        if folder is not None:
            moreh_ap.load(folder, model=model, optimizer=optimizer)
        losses = []
        for ids, labels in batches(device, count=6)[-num_steps:] if folder else batches(device, count=num_steps):
            loss = model(ids, labels)[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if to is not None:
            moreh_ap.save(to, model=model, optimizer=optimizer)
        return losses

    expected = run("cpu", 6, None)
    accelerator("shard=2")
    first = run("cuda", 3, None, tmp_path)
    sent = steps_sent(accelerator("replicate=2"))
    assert first + run("cuda", 3, tmp_path) == pytest.approx(expected, rel=1e-4)
    assert of_last(sent) == 3


@pytest.mark.rotating  # one more optimizer each
@pytest.mark.parametrize("kind", [Lamb, DecayedAdam], ids=lambda kind: kind.__name__)
def test_a_step_with_a_closure(accelerator, kind):
    """As Lightning and skorch step."""

    def script(device: str) -> Any:
        model = OwnTransformer().to(device)
        optimizer, losses = kind(model.parameters()), []
        for ids, labels in batches(device, count=4):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(ids, labels)[1]  # noqa: B023
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
        return losses, model.state_dict()

    sent = steps_sent(accelerator("replicate=2"))
    assert_same(*on_both(script), rtol=1e-4, atol=2e-5)
    assert of_last(sent) == 4


def test_a_group_that_is_added_later_counts_its_own_steps(accelerator):
    """Layers that are trained from some step on; each group counts its steps in its settings."""

    def script(device: str) -> Any:
        model = OwnTransformer().to(device)
        parameters = list(model.parameters())
        optimizer, losses = Lamb(parameters[::2]), []
        for at, (ids, labels) in enumerate(batches(device, count=5)):
            if at == 2:
                optimizer.add_param_group({"params": parameters[1::2], "lr": 3e-3})
            loss = model(ids, labels)[1]
            model.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, model.state_dict(), [group["step"] for group in optimizer.param_groups]

    sent = steps_sent(accelerator("replicate=2"))
    assert_same(*on_both(script), rtol=1e-4, atol=2e-5)
    assert len(sent) == 5


def test_an_attribute_that_the_script_changes_has_the_step_taken_there(accelerator):
    """What the workers have is that of the first step."""
    session = accelerator("replicate=2")

    def script(device: str) -> Any:
        model = OwnTransformer().to(device)
        optimizer = DecayedAdam(model.parameters())
        losses = []
        for at, (ids, labels) in enumerate(batches(device, count=4)):
            loss = model(ids, labels)[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.decay = 0.02 if at < 2 else 0.3
            optimizer.step()
            losses.append(loss.detach())
        return losses, model.state_dict()

    sent = steps_sent(session)
    assert_same(*on_both(script), rtol=1e-4, atol=2e-5)
    assert len({step.owner for step in sent}) == 2 and of_last(sent) == 2  # then those of Adam, which its own calls


class MarkedSgd(torch.optim.Optimizer):
    """Gives parameters that the script has marked another rate."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] * getattr(parameter, "factor", 1.0))


def test_an_attribute_of_a_parameter_has_the_step_taken_there(accelerator, capfd):
    """A worker has the parameter without it."""
    session = accelerator("replicate=2")

    def script(device: str) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(device)
        optimizer, losses = MarkedSgd(model.parameters()), []
        for at in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 6).to(device)).square().mean()
            loss.backward()
            if at == 2:
                model[0].weight.factor = 3.0
            optimizer.step()
            losses.append(loss.detach())
        return losses, model.state_dict()

    sent = steps_sent(session)
    assert_same(*on_both(script))
    assert len(sent) == 2, "before the attribute was there"
    assert "which is slower: it reads the attribute factor of a parameter" in capfd.readouterr().out


@pytest.mark.parametrize("plan", PLANS)
def test_the_script_reads_and_changes_the_state(accelerator, plan):
    accelerator(plan)

    def script(device: str) -> Any:
        model = OwnTransformer().to(device)
        optimizer = Rows(model.parameters())
        seen = []
        for at, (ids, labels) in enumerate(batches(device, count=4)):
            loss = model(ids, labels)[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            states = [optimizer.state[parameter] for parameter in model.parameters()]
            seen.append([states[1]["rows"].cpu().clone(), loss.detach().cpu()])
            if at == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        return seen

    assert_same(*on_both(script), rtol=1e-4, atol=2e-5)


def test_hooks_of_a_class_that_had_an_optimizer_before_the_line(accelerator):
    """PyTorch puts hooks around the step of a class when its first optimizer is made."""
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    sent = steps_sent(accelerator("replicate=2"))
    model, seen = OwnTransformer().to("cuda"), []
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for ids, labels in batches("cuda", count=2):
        model(ids, labels)[1].backward()
        optimizer.step()
    next(model.parameters()).cpu()  # behind the last step
    assert seen == ["before", "after"] * 2 and of_last(sent) == 2


def test_a_derived_class_steps_on_the_workers_of_a_second_accelerator(accelerator):
    """PyTorch sets a `step` with hooks around it on the derived class when its first optimizer is made."""

    class Named(torch.optim.AdamW):
        pass

    for plan in ("replicate=2", "shard=2", ""):
        disable()
        place, sent = ("cuda", steps_sent(accelerator(plan))) if plan else ("cpu", [])
        model = OwnTransformer().to(place)
        optimizer = Named(model.parameters())
        ids, labels = batches(place, count=1)[0]
        model(ids, labels)[1].backward()
        before = next(model.parameters()).detach().cpu().clone()
        optimizer.step()
        assert not torch.equal(next(model.parameters()).detach().cpu(), before)
        assert of_last(sent) == (1 if plan else 0)


def test_a_state_dict_outlives_its_optimizer(accelerator):
    accelerator("replicate=2")

    def script(device: str) -> Any:
        model = OwnTransformer().to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        ids, labels = batches(device, count=1)[0]
        model(ids, labels)[1].backward()
        optimizer.step()
        return {key: dict(entries) for key, entries in optimizer.state_dict()["state"].items()}

    expected, got = on_both(script)
    gc.collect()
    assert_same(expected, got)
