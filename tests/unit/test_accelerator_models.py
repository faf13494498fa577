"""Models of accelerators: by number and name, which fit, and the choice that is kept."""

from __future__ import annotations

import os
import platform

import pytest
import torch

from moreh_ap import accelerator_models, errors
from moreh_ap.accelerator import worker_starts
from moreh_ap.accelerator_models import Accelerators, Supply
from moreh_ap.flavours import FLAVOURS
from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.plan import Plan
from moreh_ap.settings import resolve_options

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
        return worker_starts.resolve_devices(resolve_options(dict(environment), **arguments).devices)

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
