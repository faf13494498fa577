"""`moreh-ap doctor`: exit status, order and arguments; every program's flags are documented."""

from __future__ import annotations

import argparse
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from moreh_ap.accelerator_models import Supply
from moreh_ap.cli.main import main
from moreh_ap.toolkit import doctor, findings, link_checks, smi, switch_model
from moreh_ap.toolkit.findings import FAILED, OK, WARNING, Finding
from moreh_ap.toolkit.machine_inventory import MachineInventory

ROOT = Path(__file__).parents[3]
TWO_CORES = MachineInventory(Supply("cpu", 2, 24 * 2**30), "A CPU")


@pytest.mark.parametrize(("worst", "status"), [(OK, 0), (WARNING, 0), (FAILED, 1)])
def test_the_exit_status_is_that_of_the_worst(monkeypatch, capsys, worst, status):
    made = [Finding("one", OK, "well"), Finding("two", worst, "[b]so[/b]", "a line" if worst != OK else "")]
    monkeypatch.setattr(doctor, "look", lambda: TWO_CORES)
    monkeypatch.setattr(doctor, "check_environment", lambda machine, num_devices: iter(made))
    monkeypatch.setattr(link_checks, "check_links", lambda *arguments: iter(()))
    assert main(["doctor"]) == status
    said = capsys.readouterr().out
    assert "[b]so[/b]" in said and ("fix: a line" in said) == (worst != OK)
    assert said.endswith(findings.summary(made) + "\n")
    assert main(["doctor", "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (status == 0) and found["checks"][1]["status"] == worst


def test_workers_are_not_started_without_what_they_need(monkeypatch, capsys):
    def never(*arguments):
        raise AssertionError("workers were started")

    monkeypatch.setattr(doctor, "look", lambda: TWO_CORES)
    missing = [Finding("torchmonarch", FAILED, "is not installed")]
    monkeypatch.setattr(doctor, "check_environment", lambda machine, num_devices: iter(missing))
    monkeypatch.setattr(link_checks, "check_links", never)
    assert main(["doctor"]) == 1
    assert "not started" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--devices", "0"], ["--timeout", "0"], ["--timeout", "nan"], ["--", "x"]])
def test_impossible_arguments(capsys, arguments):
    assert main(["doctor", *arguments]) == 2
    assert "Allowed: " in capsys.readouterr().err


def test_every_flag_is_documented():
    page = (ROOT / "docs/toolkit.md").read_text(encoding="utf-8")
    checks = argparse.ArgumentParser()
    doctor.add_arguments(checks)
    parsers = [smi.make_parser(), switch_model.make_parser(), checks]
    for parser in parsers:  # grows by the parsers of commands
        parsers += [
            one for action in parser._actions if isinstance(action.choices, dict) for one in action.choices.values()
        ]
    flags = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    missing = {flag for flag in flags - {"-h", "--help"} if f"`{flag}" not in page}
    assert not missing and len(flags) > 15


def test_every_program_can_be_started():
    section = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.scripts]\n")[1].split("\n\n")[0]
    programs = dict(re.findall(r'^([\w-]+) = "([\w.:]+)"$', section, re.MULTILINE))
    assert {"moreh-ap", "moreh-smi", "moreh-switch-model"} <= set(programs)
    for target in programs.values():
        module, _, name = target.partition(":")
        assert callable(getattr(import_module(module), name))
