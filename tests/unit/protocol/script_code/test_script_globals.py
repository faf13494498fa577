"""Variables outside of a model that forwards read and change, found in their code."""

from __future__ import annotations

import argparse
import collections
import sys
import types

import pytest
import torch
from torch import nn

from moreh_ap.protocol.script_code.script_globals import (
    PATH,
    VariablesOfModel,
    functions_of,
    read_by,
    written_by,
)

SCALE, UNUSED = 2.0, 1.0
SETTINGS = argparse.Namespace(gain=1.0, sizes=[1, 2])
TABLE, LOG, COUNT = {"a": 1.0}, [], 0
WEIGHT = torch.ones(2)
THIS = sys.modules[__name__]


class Config:
    gain = 1.0

    @classmethod
    def load(cls):
        return cls()


def scaled(x):
    return x * SCALE * WEIGHT


class Net(nn.Module):
    def forward(self, x):
        return self.activate([scaled(row) for row in x]) * SETTINGS.gain

    def activate(self, rows):
        return torch.stack(rows) * TABLE["a"]

    def unused(self):
        return UNUSED


class Elsewhere(nn.Module):
    def forward(self, x):
        Config.load()
        return x * Config.gain * THIS.SCALE * THIS.Config.gain


class Writes(nn.Module):
    def forward(self, x):
        global COUNT
        COUNT += 1
        LOG.append(float(x.sum()))
        TABLE["b"] = 1.0
        SETTINGS.gain += 1.0
        kept = []
        kept.append(1)
        return x


def made(scale, seen):
    class Enclosed(nn.Module):
        def forward(self, x):
            seen.append(1)
            return x * scale

    def set_scale(value):
        nonlocal scale
        scale = value

    return Enclosed(), set_scale


class Hook:
    def __init__(self):
        self.gain, self.seen = 2.0, []

    def __call__(self, module, args, output):
        return self.changed(output)

    def changed(self, output):
        return output * self.gain

    def collect(self, module, args, output):
        self.seen.append(output)


def names(variables):
    return {variable.name for variable in variables}


def test_what_a_forward_reads_is_found_through_methods_and_functions():
    assert names(read_by(nn.Sequential(Net()))) == {"SCALE", "SETTINGS", "TABLE", "WEIGHT", "scaled"}
    assert [function.__name__ for function in functions_of(nn.Linear(1, 1))] == []


def test_what_a_forward_reads_of_modules_and_classes_is_found():
    found = read_by(Elsewhere())
    assert names(found) == {"Config.gain", "SCALE"}
    assert [variable.value() for variable in found] == [1.0, 2.0]


def test_what_a_forward_reads_of_the_function_around_it_is_found():
    model, set_scale = made(2.0, [])
    found = {variable.name: variable for variable in read_by(model)}
    assert set(found) == {"scale"}
    set_scale(3.0)
    assert found["scale"].value() == 3.0
    VariablesOfModel(model, found["scale"].path).scale = 4.0
    assert found["scale"].value() == VariablesOfModel(model, found["scale"].path).scale == 4.0
    assert {write.name for write in written_by(model)} == {"seen"}


def test_what_a_hook_reads_is_found_if_it_returns_something():
    model, hook = nn.Linear(1, 1), Hook()
    model.register_forward_hook(hook.collect)
    assert read_by(model) == []
    model.register_forward_hook(hook)
    (variable,) = read_by(model)
    assert (variable.name, variable.value()) == ("gain", 2.0)
    VariablesOfModel(model, variable.path).gain = 5.0
    assert hook.gain == 5.0
    model.register_forward_hook(lambda module, args, output: output * SCALE)
    assert names(read_by(model)) == {"gain", "SCALE"}


def test_what_a_forward_changes_is_found():
    assert {write.name for write in written_by(Writes())} == {"COUNT", "LOG", "TABLE", "SETTINGS"}
    assert list(written_by(Net())) == []


def test_the_variables_of_a_model_are_set_where_its_functions_read_them(monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", SCALE)
    variables = VariablesOfModel(Net(), f"{PATH}{__name__}")
    assert variables.SCALE == 2.0
    variables.SCALE = 5.0
    assert scaled(torch.ones(2)).tolist() == [5.0, 5.0]
    with pytest.raises(AttributeError):
        VariablesOfModel(Net(), f"{PATH}another").SCALE  # noqa: B018
    monkeypatch.setattr(Config, "gain", 1.0)
    setattr(VariablesOfModel(Elsewhere(), f"{PATH}{__name__}"), "Config.gain", 3.0)
    assert Config.gain == 3.0


def test_an_object_that_is_alike_stays_since_others_know_it(monkeypatch):
    monkeypatch.setitem(globals(), "SETTINGS", types.SimpleNamespace(gain=1.0))
    queue = collections.deque([1])
    monkeypatch.setitem(globals(), "WEIGHT", queue)
    variables = VariablesOfModel(Net(), f"{PATH}{__name__}")
    variables.WEIGHT = collections.deque([1])
    assert globals()["WEIGHT"] is queue
    variables.WEIGHT = collections.deque([2])
    assert globals()["WEIGHT"] is not queue


def test_what_a_hook_only_fills_is_not_read():
    model, kept, store = nn.Linear(1, 1), [], {}

    def double(module, args, output):
        kept.append(output)
        store["output"] = output
        return 2 * output

    model.register_forward_hook(double)
    assert read_by(model) == []
    model.register_forward_hook(lambda module, args, output: kept[-1])
    assert names(read_by(model)) == {"kept"}


def test_a_function_without_the_variable_stays():
    first, second = (lambda scale: lambda *_: scale)(1.0), (lambda gain: lambda *_: gain)(1.0)
    model = nn.Linear(1, 1)
    model.register_forward_hook(first)
    model.register_forward_hook(second)
    for variable in read_by(model):
        setattr(VariablesOfModel(model, variable.path), variable.name, 2.0)
    assert (first(), second()) == (2.0, 2.0)
