"""Models and optimizers that the script drops: the workers free them, as one device would."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from rotating import rotating_from
from torch import nn

from moreh_ap import device
from moreh_ap.errors import NotComputedError
from moreh_ap.protocol.messages.models import ChangeModule
from moreh_ap.protocol.messages.optimizers import DescribeOptimizer
from moreh_ap.session.session import Session


def assert_freed(session: Session, *commands: object) -> None:
    """Fails if workers still have what the commands ask about."""
    gc.collect()
    session.synchronize()  # the message takes along what finalizers have released
    for command in commands:
        with pytest.raises((KeyError, NotComputedError)):  # the latter where an earlier test had an error
            session.outbox.submit(command).result()


def train(steps: int) -> list[object]:
    """Trains a model; returns commands that fail where the model, or its optimizer, is not there."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        model(torch.randn(8, 4, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        model(torch.randn(8, 4, device="cuda")).sum().item()
    asking: list[object] = [ChangeModule(model[0].weight._cell.value.ref.owner, ())]
    if steps:
        asking.append(DescribeOptimizer(optimizer.__dict__["_moreh_remote"].owner))
    session = device.current().session
    for command in asking:
        session.outbox.submit(command).result()
    return asking


@pytest.mark.parametrize("plan", rotating_from(1, ["replicate=2", "shard=2"]))
def test_workers_free_what_the_script_has_dropped(accelerator: Callable[[str], Session], plan: str):
    session = accelerator(plan)
    assert_freed(session, *train(steps=0))  # a model that is only asked, not trained
    assert_freed(session, *train(steps=2))
    assert_freed(session, *train(steps=2))


def test_a_parameter_keeps_its_model(accelerator: Callable[[str], Session]):
    accelerator("replicate=2")
    model = nn.Sequential(nn.Linear(4, 2)).cuda()
    model(torch.ones(4, 4).cuda()).sum().backward()
    weight, expected = model[0].weight, model[0].weight.cpu()
    del model
    gc.collect()
    assert torch.equal(weight.cpu(), expected)
    assert weight.grad is not None


def test_a_model_that_goes_to_the_cpu_leaves_the_workers_also_with_buffers(accelerator: Callable[[str], Session]):
    session = accelerator("replicate=2")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
    model(torch.randn(8, 4).cuda()).sum().backward()
    command = ChangeModule(model[0].weight._cell.value.ref.owner, ())
    mean = model[1].running_mean  # `to` makes another one: this one stays where it is
    model.to("cpu")
    assert_freed(session, command)
    assert mean.is_cuda
    assert torch.equal(mean.cpu(), model[1].running_mean)
    assert mean.any()


def test_a_part_of_a_model_may_go_to_the_cpu(accelerator: Callable[[str], Session]):
    accelerator("replicate=2")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).cuda()
    x = torch.randn(8, 4).cuda()
    expected = model(x).cpu()
    model[1].to("cpu")
    assert torch.allclose(model[1](model[0](x).cpu()), expected)
