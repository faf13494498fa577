"""The checks of `moreh-ap doctor` that start no worker, its exit status; what is documented and installed."""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import socket
from collections import namedtuple
from importlib import import_module, metadata
from pathlib import Path

import pytest

from moreh_ap import accelerator_models
from moreh_ap.accelerator_models import Accelerators, Supply
from moreh_ap.cli.main import main
from moreh_ap.local import jobs
from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.toolkit import doctor, environment_checks, findings, smi, switch_model
from moreh_ap.toolkit.findings import FAILED, OK, WARNING, Finding
from moreh_ap.toolkit.machine import Gpu, Machine

ROOT = Path(__file__).parents[2]
TWO_CORES = Machine(Supply("cpu", 2, 24 * 2**30), "A CPU")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def checked(machine=TWO_CORES, num_devices=2) -> dict[str, Finding]:
    return {found.name: found for found in environment_checks.check_environment(machine, num_devices)}


def test_what_this_machine_has_is_enough_for_the_tests(monkeypatch):
    found = checked()
    assert {"Python", "torch", "torchmonarch", "transformers", "psutil", "loopback", "/dev/shm"} <= set(found)
    assert not [one for one in found.values() if one.status == FAILED]
    assert found["torch"].found.startswith(metadata.version("torch"))


def test_packages_out_of_range_or_missing_fail_with_the_line_to_paste(monkeypatch):
    versions = {"torch": "2.3.0", "torchmonarch": "0.6.1"}
    real = metadata.version

    def version(name):
        if name == "transformers":
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = checked()
    assert found["torch"] == Finding("torch", FAILED, "2.3.0 (>=2.11)", 'pip install "torch>=2.11"')
    assert found["torchmonarch"].fix == 'pip install "torchmonarch==0.7.0"'
    assert found["transformers"].status == FAILED and "is not installed" in found["transformers"].found
    assert "pytest" not in found, "what only developers need is nobody's failure"


def test_limits_that_are_too_low(monkeypatch, cache):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 * 2**20, 0, 64 * 2**20))
    (cache / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(cache / "file"))

    def unknown(name):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    little = Machine(Supply("cpu", 2, 2**28), "A CPU")
    found = checked(little)
    assert (found["open files"].status, found["open files"].fix) == (WARNING, "ulimit -n 65536")
    assert (found["/dev/shm"].status, found["scratch folder"].status) == (WARNING, WARNING)
    assert found["cache folder"].status == FAILED and "cannot be written" in found["cache folder"].found
    assert found["host name"].status == WARNING and "/etc/hosts" in found["host name"].fix
    assert found["memory"].status == WARNING
    assert all(one.fix for one in found.values() if one.status != OK)


def test_a_loopback_that_does_not_answer(monkeypatch):
    def refused(address, timeout):
        raise ConnectionRefusedError("Connection refused")

    monkeypatch.setattr(socket, "create_connection", refused)
    found = checked()["loopback"]
    assert found.status == FAILED and "Connection refused" in found.found


def test_a_model_with_more_devices_than_there_are(monkeypatch):
    gpus = tuple(Gpu(index, "H100", 2**36) for index in range(2))
    accelerator_models.save("cuda", Accelerators(0, {0: "Large.256GB"}))
    found = checked(Machine(Supply("cuda", 2), "A CPU", gpus))
    assert found["accelerator"].status == FAILED
    assert found["devices"].found == "2 x H100"


def test_other_jobs_are_a_warning(monkeypatch):
    job = jobs.Job(0, "", "cpu", 1, 1)
    assert checked()["other jobs"].status == WARNING
    job.close()
    assert checked()["other jobs"].status == OK


@pytest.mark.parametrize(("worst", "status"), [(OK, 0), (WARNING, 0), (FAILED, 1)])
def test_the_exit_status_is_that_of_the_worst(monkeypatch, capsys, worst, status):
    made = [Finding("one", OK, "well"), Finding("two", worst, "[b]so[/b]", "a line" if worst != OK else "")]
    monkeypatch.setattr(doctor, "look", lambda: TWO_CORES)
    monkeypatch.setattr(doctor, "check_environment", lambda machine, num_devices: iter(made))
    monkeypatch.setattr(doctor, "check_links", lambda *arguments: iter(()))
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
    monkeypatch.setattr(doctor, "check_links", never)
    assert main(["doctor"]) == 1
    assert "not started" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--devices", "0"], ["--timeout", "0"], ["--timeout", "nan"], ["--", "x"]])
def test_impossible_arguments(capsys, arguments):
    assert main(["doctor", *arguments]) == 2
    assert "Allowed: " in capsys.readouterr().err


def test_every_flag_is_documented():
    page = (ROOT / "docs/toolkit.md").read_text(encoding="utf-8")
    commands = argparse.ArgumentParser().add_subparsers()
    doctor.add_arguments(commands)
    parsers = [smi.make_parser(), switch_model.make_parser(), *commands.choices.values()]
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
