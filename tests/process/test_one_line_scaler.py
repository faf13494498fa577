"""`GradScaler`: gradients are unscaled and checked by the workers; a step without finite gradients is skipped."""

from __future__ import annotations

import pytest
import torch
from one_line_models import OwnTransformer
from test_one_line_training import assert_same, batches, on_both
from torch import nn

from moreh_ap.protocol.messages.state import ReadState, UnscaleGradients, WriteState
from moreh_ap.session.models.parameter_gradients import Gradients

pytestmark = pytest.mark.rotating  # one more plan or optimizer each

PLANS = ["replicate=2", "shard=2", "tensor=2", "pipeline=2, micro_batches=2"]
OPTIMIZERS = {
    "sgd": lambda parameters, **how: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **how),
    "adamw": lambda parameters, **how: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6, **how),
}


@pytest.fixture(params=PLANS, autouse=True)
def session(request, accelerator):
    return accelerator(request.param)


def scaled_steps(device, make, *, clips=False, overflow_at=(), **how):
    """Losses, scales and weights of training with a scaler; gradients overflow in some steps."""
    model = OwnTransformer().to(device)
    optimizer = make(model.parameters(), **how)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    trace = []
    for step, (ids, labels) in enumerate(batches(device, count=6)):
        loss = model(ids, labels)[1]
        scaler.scale(loss * (1e38 if step in overflow_at else 1.0)).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        trace.append((loss.detach(), scaler.get_scale()))
    return trace, model.state_dict()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(("name", "clips"), [("sgd", False), ("adamw", True)])
def test_a_scaler(name, fused, clips):
    def script(device):
        return scaled_steps(device, OPTIMIZERS[name], fused=fused, clips=clips, overflow_at=(1, 4))

    assert_same(*on_both(script), rtol=1e-4, atol=1e-4 if name == "adamw" else 1e-5)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_gradients_do_not_travel_for_a_scaler(session, fused):
    sent = []
    scaled_steps("cuda", OPTIMIZERS["sgd"])  # a plan that divides a model is verified first, which reads gradients
    session.outbox.on_sent = lambda commands, posted: sent.extend(commands)
    try:
        scaled_steps("cuda", OPTIMIZERS["sgd"], fused=fused)
    finally:
        session.outbox.on_sent = None
    assert sum(isinstance(command, UnscaleGradients) for command in sent) == 6
    read = [ref.kind for command in sent if isinstance(command, ReadState) for ref in command.refs]
    assert read.count("grad") == 0 and read.count("found") == 6  # a step waits once, as on one device
    assert not any(isinstance(command, WriteState) for command in sent)


def test_a_scaler_looks_at_no_gradient(monkeypatch):
    """PyTorch looks five times at each, and waits for the backward at the first."""
    looked = []
    scaled_steps("cuda", OPTIMIZERS["sgd"])  # a plan that divides a model is verified first, which looks at gradients
    monkeypatch.setattr(Gradients, "get", lambda gradients, name: looked.append(name))
    _, weights = scaled_steps("cuda", OPTIMIZERS["sgd"])
    assert not looked and len(weights) > 8


def test_a_fused_step_of_sgd_without_a_scaler(session):
    """PyTorch's fused kernel of SGD knows no DTensors."""

    def script(device):
        model = OwnTransformer().to(device)
        optimizer = OPTIMIZERS["sgd"](model.parameters(), fused=True)
        for ids, labels in batches(device):
            model(ids, labels)[1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    assert_same(*on_both(script))
