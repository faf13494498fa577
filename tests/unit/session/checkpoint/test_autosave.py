"""At which moments a script is saved by itself."""

from __future__ import annotations

import signal
import types

import pytest
import torch
from torch import nn

import moreh_ap
from moreh_ap.session.checkpoint import background_save
from moreh_ap.session.checkpoint.autosave import AutoSave

BATCH = torch.ones(4, 2)


@pytest.fixture
def saving(tmp_path):
    """An AutoSave that saves whenever it may."""
    before = signal.getsignal(signal.SIGTERM)
    session = types.SimpleNamespace(autosave=None)
    saving = AutoSave(session, str(tmp_path), every_s=0.0)
    yield saving
    saving.close()
    assert session.autosave is None
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def saves(saving, tmp_path):
    """Returns how many steps the folder's last checkpoint has."""

    def saved_steps():
        background_save.wait()
        return moreh_ap.load(tmp_path)["steps"] if (tmp_path / "checkpoint.json").exists() else 0

    return saved_steps


def step(model, optimizer):
    model(BATCH).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_is_saved_before_the_next_training_call(saves):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    assert saves() == 0
    with torch.no_grad():
        model(BATCH)
    nn.ReLU()(BATCH)
    assert saves() == 0, "an evaluation, and a module without parameters, are no step"
    model(BATCH)
    assert saves() == 1
    model(BATCH)
    assert saves() == 1, "a further call of the same step"


def test_a_step_of_two_optimizers_ends_with_the_one_that_began_last(saves):
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    for _ in range(2):
        step(first, optimizers[0])
        step(second, optimizers[1])
    assert saves() == 1, "the end of the first step of both"
    step(first, optimizers[0])
    assert saves() == 2
    second(BATCH)
    assert saves() == 2, "in the middle of the third"


def test_steps_of_a_checkpoint_that_was_loaded_count(saving, saves):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    restored = []
    saving.resumed(10, lambda: restored.append(True))
    with torch.no_grad():
        model(BATCH)
    assert not restored
    for _ in range(3):
        step(model, optimizer)
    assert restored == [True]
    assert saves() == 12
