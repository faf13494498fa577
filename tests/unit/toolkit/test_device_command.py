"""`moreh-smi device`: accelerators are added, chosen and removed."""

from __future__ import annotations

import os

from moreh_ap import accelerator_models
from moreh_ap.accelerator_models import Accelerators
from moreh_ap.local import jobs
from moreh_ap.toolkit import smi
from unit.toolkit.samples import TWO_CORES, answers


def test_accelerators_are_added_chosen_and_removed(cpu_machine, monkeypatch, capsys):
    assert smi.main(["device", "--add", "cpu.4"]) == 0
    answers(monkeypatch, "1\n")
    assert smi.main(["device", "--add"]) == 0
    assert accelerator_models.load("cpu") == Accelerators(0, {0: "", 1: "CPU.4", 2: "CPU.1"})
    assert smi.main(["device", "--switch", "1"]) == 0
    assert accelerator_models.chosen_devices(TWO_CORES) == 4
    assert smi.main(["device", "--rm", "1"]) == 0
    assert accelerator_models.load("cpu") == Accelerators(0, {0: "", 2: "CPU.1"}), "the first that is left is current"
    answers(monkeypatch, "2\n")
    assert smi.main(["device", "--rm"]) == 0
    assert accelerator_models.load("cpu") == Accelerators(0, {0: ""})
    said = capsys.readouterr().out
    for words in ("Create device success.", "Switch Current device success.", "Remove device success."):
        assert words in said
    assert smi.main(["device", "--list"]) == 0
    assert capsys.readouterr().out == "1. CPU.1\n2. CPU.2\n3. CPU.4\n"


def test_what_cannot_be_done_with_accelerators_is_said(cpu_machine, monkeypatch, capsys):
    assert smi.main(["device", "--rm", "0"]) == 2
    assert "is the only one" in capsys.readouterr().err
    for _ in range(4):
        assert smi.main(["device", "--add", "1"]) == 0
    assert smi.main(["device", "--add", "1"]) == 2
    assert "at most 5" in capsys.readouterr().err
    assert smi.main(["device", "--switch", "7"]) == 2
    assert "there is no accelerator '7'" in capsys.readouterr().err
    job = jobs.Job(2, "CPU.1", "cpu", 1, 1)
    assert smi.main(["device", "--rm", "2"]) == 2
    assert f"accelerator 2 is in use by job {os.getpid()}" in capsys.readouterr().err
    job.close()
    assert smi.main(["device", "--rm", "2"]) == 0
    answers(monkeypatch, "")
    assert smi.main(["device", "--switch"]) == 1
