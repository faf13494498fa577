"""Global variables that forwards read and change, found in their code."""

from __future__ import annotations

import argparse
import types

import pytest
import torch
from torch import nn

from moreh_ap.protocol.script_code.script_globals import (
    PATH,
    GlobalsOfModel,
    form_of,
    functions_of,
    read_by,
    written_by,
)

SCALE, UNUSED = 2.0, 1.0
SETTINGS = argparse.Namespace(gain=1.0, sizes=[1, 2])
TABLE, LOG, COUNT = {"a": 1.0}, [], 0
WEIGHT = torch.ones(2)


def scaled(x):
    return x * SCALE * WEIGHT


class Net(nn.Module):
    def forward(self, x):
        return self.activate([scaled(row) for row in x]) * SETTINGS.gain

    def activate(self, rows):
        return torch.stack(rows) * TABLE["a"]

    def unused(self):
        return UNUSED


class Writes(nn.Module):
    def forward(self, x):
        global COUNT
        COUNT += 1
        LOG.append(float(x.sum()))
        TABLE["b"] = 1.0
        kept = []
        kept.append(1)
        return x


def test_what_a_forward_reads_is_found_through_methods_and_functions():
    assert {variable.name for variable, _ in read_by(nn.Sequential(Net()))} == {"SCALE", "SETTINGS", "TABLE"}
    assert [function.__name__ for function in functions_of(nn.Linear(1, 1))] == []


def test_what_a_forward_changes_is_found():
    assert {write.name for write in written_by(Writes())} == {"COUNT", "LOG", "TABLE"}
    assert list(written_by(Net())) == []


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, 2),
        (1, True),
        ("a", "b"),
        ([1, [2]], [1, [3]]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1}),
        (argparse.Namespace(a=1), argparse.Namespace(a=2)),
        (types.SimpleNamespace(a=(1,)), types.SimpleNamespace(a=(2,))),
        (torch.float32, torch.float64),
    ],
)
def test_a_form_is_equal_as_long_as_the_value_is(value, other):
    assert form_of(value) == form_of(value) is not None
    assert form_of(value) != form_of(other)


@pytest.mark.parametrize("value", [torch.ones(1), nn.Linear(1, 1), [torch.ones(1)], list(range(1000)), open, Net])
def test_what_is_large_or_no_plain_value_has_no_form(value):
    assert form_of(value) is None


def test_the_globals_of_a_model_are_set_where_its_functions_read_them(monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", SCALE)
    variables = GlobalsOfModel(Net(), f"{PATH}{__name__}")
    assert variables.SCALE == 2.0
    variables.SCALE = 5.0
    assert scaled(torch.ones(2)).tolist() == [5.0, 5.0]
    with pytest.raises(AttributeError):
        GlobalsOfModel(Net(), f"{PATH}another").SCALE  # noqa: B018
