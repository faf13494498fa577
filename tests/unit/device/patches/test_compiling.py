"""What a script asks of `torch.compile`, and what it declines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moreh_ap.device.patches import compiling
from moreh_ap.device.patches.compiling import compiled_in, declined_in
from moreh_ap.patching import Patches
from moreh_ap.protocol.messages.compile_requests import CompileRequest


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """`torch.compile` notes what it is asked, and nothing is told to workers."""
    for variable in compiling._SWITCHES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(compiling, "run_as_written", lambda group: None)
    patches, told = Patches(), []
    compiling.install(patches, SimpleNamespace(note_compiled=told.append))
    yield told
    patches.undo()


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_what_is_compiled_is_noted_with_its_options(installed):
    root = model()
    torch.compile(root[1], backend="aot_eager", dynamic=False)
    assert compiled_in(root) == (("1", CompileRequest("aot_eager", None, False)),) and not declined_in(root)
    assert installed == [root[1]]


@pytest.mark.parametrize("way", ["function", "method", "decorated forward"])
def test_what_is_disabled_runs_as_written(installed, way):
    root = model()
    if way == "function":
        torch.compile(root[0], disable=True)
    elif way == "method":
        root[0].compile(disable=True)
    else:

        class Own(nn.Module):
            @torch.compile(disable=True)
            def forward(self, x):
                return x

        root = nn.Sequential(Own())
    assert compiled_in(root) == () and declined_in(root) and installed == []


def test_the_last_word_counts(installed):
    root = model()
    root.compile(backend="aot_eager")
    root.compile(disable=True)
    assert compiled_in(root) == () and declined_in(root)
    root.compile(backend="aot_eager")
    assert len(compiled_in(root)) == 1 and not declined_in(root)


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_the_environment_switches_compiling_off(monkeypatch, variable):
    root = model()
    torch.compile(root, backend="aot_eager")
    monkeypatch.setenv(variable, "1")
    assert compiled_in(root) == () and declined_in(root)
