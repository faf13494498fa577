"""Models of an accelerator: which there are, how one is chosen, and what outranks the choice."""

from __future__ import annotations

import builtins
import io
import os
import platform
import sys

import pytest
import torch

from moreh_ap import accelerator, accelerator_models, errors
from moreh_ap.accelerator_models import Accelerators, Supply
from moreh_ap.local import jobs
from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.plan import Plan
from moreh_ap.planner.search.remedies import FLAVOURS
from moreh_ap.settings import resolve_options
from moreh_ap.toolkit import devices, smi, switch_model
from moreh_ap.toolkit.machine import Machine

TWO_CORES = Supply("cpu", 2, 24 * 2**30)
EIGHT_GPUS = Supply("cuda", 8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("supply", "text", "name"),
    [
        (TWO_CORES, "1", "CPU.1"),
        (TWO_CORES, "3", "CPU.4"),
        (TWO_CORES, "cpu.3", "CPU.3"),
        (EIGHT_GPUS, "4", "xLarge.512GB"),
        (EIGHT_GPUS, "xlarge", "xLarge.512GB"),
        (EIGHT_GPUS, "SMALL.64gb", "Small.64GB"),
        (EIGHT_GPUS, "GPU.3", "GPU.3"),
        (Supply("cuda", 6), "14", "GPU.6"),
        (Supply("cpu", 64, 512 * 2**30), "xLarge", "xLarge.512GB"),
    ],
)
def test_models_are_found_by_number_and_name(supply, text, name):
    assert accelerator_models.find_model(text, supply) == name


@pytest.mark.parametrize(
    ("supply", "text", "fact"),
    [
        (TWO_CORES, "4", "there is no number 4"),
        (TWO_CORES, "0", "there is no number 0"),
        (TWO_CORES, "CPU.5", "CPU.5 has 5 devices"),
        (
            TWO_CORES,
            "4xLarge.2048GB",
            "4xLarge.2048GB has 32 devices of 64 GB; this machine has 2 CPU cores and 24 GiB",
        ),
        (TWO_CORES, "Small.64GB", "Small.64GB has 1 device of 64 GB"),
        (TWO_CORES, "GPU.1", "there is no model"),
        (EIGHT_GPUS, "5", "1.5xLarge.768GB has 12 devices of 64 GB; this machine has 8 GPUs"),
        (EIGHT_GPUS, "GPU.9", "GPU.9 has 9 devices"),
        (EIGHT_GPUS, "CPU.1", "there is no model"),
        (EIGHT_GPUS, "", "there is no model"),
    ],
)
def test_other_models_are_refused_with_what_there_is(supply, text, fact):
    with pytest.raises(errors.OptionError) as refused:
        accelerator_models.find_model(text, supply)
    assert refused.value.fact.startswith(fact)
    assert accelerator_models.model_of_all(supply) in refused.value.allowed and refused.value.fix and refused.value.link


def test_gpu_machines_list_all_thirteen_and_cpu_machines_what_fits():
    assert list(accelerator_models.models_of(EIGHT_GPUS)) == list(FLAVOURS) and len(FLAVOURS) == 13
    assert list(accelerator_models.models_of(TWO_CORES)) == ["CPU.1", "CPU.2", "CPU.4"]
    assert list(accelerator_models.models_of(TWO_CORES, "CPU.3")) == ["CPU.1", "CPU.2", "CPU.3", "CPU.4"]
    large = accelerator_models.models_of(Supply("cpu", 8, 128 * 2**30))
    assert list(large) == ["Small.64GB", "Medium.128GB", "CPU.1", "CPU.2", "CPU.4", "CPU.8", "CPU.16"]


def test_argument_outranks_plan_outranks_variable_outranks_model(monkeypatch):
    def taken(environment=(), **arguments):
        return accelerator.resolve_devices(resolve_options(dict(environment), **arguments).devices)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    variable = {"MOREH_NUM_DEVICES": "3"}
    assert taken() == ("cpu", 2), "nothing was chosen: one worker a core"
    accelerator_models.save("cpu", Accelerators(1, {0: "CPU.1", 1: "CPU.4"}))
    assert taken() == ("cpu", 4)
    assert taken(variable) == ("cpu", 3)
    assert taken(variable, plan=Plan.parse("shard=2")) == ("cpu", 2)
    assert taken(variable, devices=1) == ("cpu", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert taken() == ("cuda", 8), "the choice for CPU workers is another"
    accelerator_models.save("cuda", Accelerators(0, {0: "Large.256GB"}))
    assert taken() == ("cuda", 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(errors.OptionError, match=r"model is Large.256GB, with 4 devices; this machine has 2 GPUs"):
        taken()
    assert taken(devices=2) == ("cuda", 2), "an argument does not look at the model"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"KEY": 3}', '{"KEY": {"current": 1, "models": {"0": "CPU.1"}}}'])
def test_a_broken_file_counts_as_no_choice(cache, text):
    (cache / "accelerators.json").write_text(text.replace("KEY", f"{platform.node()}, cpu"))
    assert accelerator_models.load("cpu") == Accelerators(0, {0: ""})
    accelerator_models.save("cpu", Accelerators(0, {0: "CPU.1"}))
    assert accelerator_models.load("cpu").model == "CPU.1"


def test_a_model_that_somebody_wrote_into_the_file_is_named():
    accelerator_models.save("cpu", Accelerators(0, {0: "Huge"}))
    with pytest.raises(errors.OptionError, match=r"accelerators.json names the model 'Huge'"):
        accelerator_models.chosen_devices(TWO_CORES)


@pytest.fixture
def cpu_machine(monkeypatch):
    monkeypatch.setattr(switch_model, "look", lambda: Machine(TWO_CORES))
    monkeypatch.setattr(devices, "look", lambda: Machine(TWO_CORES))


def answers(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_switching_by_answers(cpu_machine, monkeypatch, capsys):
    answers(monkeypatch, "9\nhuge\n\n1\n3\nQ\n")
    assert switch_model.main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "Current MoAI Accelerator: CPU.2\n\n1. CPU.1\n2. CPU.2  *\n3. CPU.4\n\nSelection (1-3, q, Q): 9\n"
    )
    assert "there is no number 9 in the list" in said and "there is no model 'huge'" in said
    assert 'The MoAI Accelerator model is successfully switched to  "CPU.1".' in said
    assert "1. CPU.1\n2. CPU.2\n3. CPU.4  *\n" in said
    assert accelerator_models.load("cpu").model == "CPU.4"


@pytest.mark.parametrize(
    ("text", "status", "model"), [("", 1, ""), ("7\n", 1, ""), ("1\n", 0, "CPU.1"), ("q\n1\n", 0, "")]
)
def test_input_that_ends(cpu_machine, monkeypatch, capsys, text, status, model):
    answers(monkeypatch, text)
    assert switch_model.main([]) == status
    assert accelerator_models.load("cpu").model == model
    assert ("Nothing was done" in capsys.readouterr().err) == (status == 1)


def test_ctrl_c_ends_with_its_status(cpu_machine, monkeypatch):
    def interrupted(question):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupted)
    assert switch_model.main([]) == 130
    assert accelerator_models.load("cpu").model == ""


def test_switching_by_argument(cpu_machine, capsys):
    for arguments, model in ((["1"], "CPU.1"), (["-M", "3"], "CPU.4"), (["cpu.2"], "CPU.2"), (["--all"], "")):
        assert switch_model.main(arguments) == 0
        assert accelerator_models.load("cpu").model == model
    assert switch_model.main(["8"]) == 2
    said = capsys.readouterr().err
    assert "Allowed: CPU.1, CPU.2, CPU.4" in said and "Try: moreh-switch-model CPU.2" in said
    with pytest.raises(SystemExit, match="2"):
        switch_model.main(["1", "--all"])
    assert switch_model.main(["--list"]) == 0


def test_a_folder_that_cannot_be_written_is_an_error(cpu_machine, cache, monkeypatch, capsys):
    (cache / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(cache / "file"))
    assert switch_model.main(["1"]) == 2
    assert "the choice cannot be kept" in capsys.readouterr().err


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
