"""Models that train together change places together, at a call before which no backward is due."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moreh_ap.session.own_process import small_models
from moreh_ap.session.own_process.faster_place import FasterPlace
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import OnWorkers

pytestmark = pytest.mark.rotating  # one more script each

ROWS, STEPS = 64, 16


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def is_on_workers(tensor: torch.Tensor) -> bool:
    return isinstance(tensor._cell.value, OnWorkers)


class Run:
    """One script: its models, its steps, and where the models are after each."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.places, self.losses = device, [], []
        self.models: dict[str, nn.Module] = {}
        self.optimizers: list[torch.optim.Optimizer] = []

    def batch(self, columns: int = 8) -> torch.Tensor:
        return torch.randn(ROWS, columns).to(self.device)

    def record(self, *losses: torch.Tensor) -> None:
        self.losses += [loss.item() for loss in losses]
        first = {name: next(model.parameters()) for name, model in self.models.items()}
        if self.device == "cuda":
            self.places.append("".join("w" if is_on_workers(one) else "h" for one in first.values()))

    def numbers(self) -> list[float]:
        values = [one for model in self.models.values() for one in model.state_dict().values()]
        states = [state for optimizer in self.optimizers for state in optimizer.state_dict()["state"].values()]
        values += [one for state in states for one in state.values()]
        return [*self.losses, *(float(value.double().abs().sum()) for value in values if value is not None)]


def gan(run: Run) -> None:
    """The discriminator's step uses detached samples; the generator's, the same samples in another call."""
    generator, critic = net(8, 8).to(run.device), net(8, 1).to(run.device)
    run.models = {"generator": generator, "critic": critic}
    by_critic, by_generator = (torch.optim.Adam(one.parameters(), lr=1e-3) for one in (critic, generator))
    run.optimizers = [by_generator, by_critic]
    for _ in range(STEPS):
        real, noise = run.batch(), run.batch()
        fake = generator(noise)
        by_critic.zero_grad()
        of_critic = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        of_critic.backward()
        by_critic.step()
        by_generator.zero_grad()
        of_generator = F.softplus(-critic(fake)).mean()
        of_generator.backward()
        by_generator.step()
        run.record(of_critic, of_generator)


def autoencoder(run: Run) -> None:
    """An encoder and a decoder of their own, noise between them, one optimizer for both."""
    encoder, decoder = net(8, 8).to(run.device), net(4, 8).to(run.device)
    run.models = {"encoder": encoder, "decoder": decoder}
    optimizer = torch.optim.AdamW(itertools.chain(encoder.parameters(), decoder.parameters()), lr=1e-3)
    run.optimizers = [optimizer]
    for _ in range(STEPS):
        x, noise = run.batch(), run.batch(4)
        mean, log_variance = encoder(x).chunk(2, dim=1)
        z = mean + noise * (0.5 * log_variance).exp()
        loss = F.mse_loss(decoder(z), x) + 1e-3 * (mean.square() + log_variance.exp() - log_variance).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(loss)


def distillation(run: Run) -> None:
    """A frozen teacher has no optimizer."""
    teacher, student = net(8, 5).to(run.device).eval(), net(8, 5).to(run.device)
    run.models = {"teacher": teacher, "student": student}
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    run.optimizers = [optimizer]
    for _ in range(STEPS):
        x = run.batch()
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        loss = F.kl_div(student(x).log_softmax(-1), wanted, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(loss)


def target_network(run: Run) -> None:
    """A copy of the network that follows it slowly, and is now and then replaced by it."""
    network = net(8, 4).to(run.device)
    target = copy.deepcopy(network)
    run.models = {"network": network, "target": target}
    optimizer = torch.optim.RMSprop(network.parameters(), lr=1e-3)
    run.optimizers = [optimizer]
    for step in range(STEPS):
        x, after = run.batch(), run.batch()
        action = torch.randint(4, (ROWS, 1)).to(run.device)
        with torch.no_grad():
            wanted = 1.0 + 0.9 * target(after).max(1).values
        loss = F.smooth_l1_loss(network(x).gather(1, action).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(network.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 4:
            target.load_state_dict(network.state_dict())
        else:
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), network.parameters()):
                    slow.mul_(0.99).add_(fast, alpha=0.01)
        run.record(loss)


def on(device: str, script: Callable[[Run], None]) -> Run:
    """Returns what a script has done on a device."""
    run = Run(device)
    script(run)
    return run


SCRIPTS = [gan, autoencoder, distillation, target_network]


@pytest.fixture
def session(accelerator: Callable[[str], Session], monkeypatch, tmp_path) -> Session:
    """A session that nobody has told how to lay models out, to which none is small, and which remembers nothing."""
    monkeypatch.setattr(small_models, "step_flops", lambda root, call: math.inf)
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    session = accelerator("replicate=2")
    session.options = replace(session.options, plan=None)
    return session


@pytest.fixture
def steps_on_workers_take(monkeypatch) -> Callable[[float], None]:
    """Has the workers' steps count as so many seconds."""

    def take(seconds: float) -> None:
        original = FasterPlace.measured_on_workers
        monkeypatch.setattr(
            FasterPlace, "measured_on_workers", lambda self, roots, by, _: original(self, roots, by, seconds)
        )

    return take


@pytest.mark.parametrize("script", SCRIPTS)
def test_models_whose_steps_are_faster_here_leave_the_workers_together(session, steps_on_workers_take, script, capsys):
    steps_on_workers_take(1e6)
    ours = on("cuda", script)
    moved = ours.places.index("hh")
    assert moved >= 6 and ours.places == ["ww"] * moved + ["hh"] * (STEPS - moved)
    assert ours.numbers() == pytest.approx(on("cpu", script).numbers(), rel=1e-4, abs=1e-5)
    assert capsys.readouterr().out.count("in this process: a step takes ") == 1
    again = on("cuda", script)  # as another run of the script
    assert again.places == ["hh"] * STEPS
    assert again.numbers() == pytest.approx(on("cpu", script).numbers(), rel=1e-6)


@pytest.mark.parametrize("script", SCRIPTS)
def test_models_whose_steps_are_slower_here_return_to_the_workers(session, steps_on_workers_take, script, capsys):
    steps_on_workers_take(1e-9)
    ours = on("cuda", script)
    assert ours.places[0] == ours.places[-1] == "ww" and 4 <= ours.places.count("hh") <= 5
    assert ours.numbers() == pytest.approx(on("cpu", script).numbers(), rel=1e-4, abs=1e-5)
    assert "on the workers: a step takes 1e-09 s on 2 workers, and " in capsys.readouterr().out
    assert on("cuda", script).places == ["ww"] * STEPS  # what was measured is not measured again


class Both(nn.Module):
    """A generator and a critic that are one model, called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = net(8, 8), net(8, 1)


def gan_in_one(run: Run, *, retain: bool) -> None:
    model = Both().to(run.device)
    run.models = {"both": model}
    by_critic, by_generator = (torch.optim.SGD(one.parameters(), lr=1e-3) for one in (model.critic, model.generator))
    run.optimizers = [by_generator, by_critic]
    for _ in range(STEPS):
        fake = model.generator(run.batch())
        by_critic.zero_grad()
        of_critic = F.softplus(-model.critic(run.batch())).mean() + F.softplus(model.critic(fake.detach())).mean()
        of_critic.backward()
        by_critic.step()
        by_generator.zero_grad()
        of_generator = F.softplus(-model.critic(fake)).mean()
        of_generator.backward(retain_graph=retain)
        by_generator.step()
        run.record(of_critic, of_generator)


@pytest.mark.parametrize("retain", [False, True])
def test_a_model_stays_while_a_backward_may_follow(session, steps_on_workers_take, monkeypatch, retain):
    """The critic's step ends the timing, and its next call comes between the generator's forward and backward."""
    steps_on_workers_take(1e6)
    refused = []
    monkeypatch.setattr(FasterPlace, "put_off", lambda self: refused.append(True))

    def script(run):
        gan_in_one(run, retain=retain)

    ours = on("cuda", script)
    assert refused and ("h" in ours.places) is not retain
    assert ours.numbers() == pytest.approx(on("cpu", script).numbers(), rel=1e-4, abs=1e-5)


def test_an_output_that_was_not_read_is_read_after_its_model_has_moved(session, steps_on_workers_take):
    steps_on_workers_take(1e6)

    def script(run):
        model = net(8, 64).to(run.device)
        run.models, kept = {"model": model}, []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            outputs = model(run.batch())
            loss = outputs.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.record(loss)
            kept.append(outputs.detach())
        run.losses += [float(one.double().abs().sum()) for one in kept]

    ours = on("cuda", script)
    assert ours.places[-1] == "h"
    assert ours.numbers() == pytest.approx(on("cpu", script).numbers(), rel=1e-4, abs=1e-5)


def test_a_model_that_takes_no_part_in_the_steps_stays_on_the_workers(session, steps_on_workers_take):
    steps_on_workers_take(1e6)
    first = net(8, 5).cuda()
    first(torch.randn(ROWS, 8).cuda()).sum().item()
    after = on("cuda", autoencoder)
    assert after.places[-1] == "hh"
    assert is_on_workers(next(first.parameters()))
    x = torch.randn(4, 8)
    assert torch.allclose(first(x.cuda()).cpu(), copy.deepcopy(first).cpu()(x), atol=1e-5)
