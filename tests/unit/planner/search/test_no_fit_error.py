"""The error where no plan fits names bytes, a batch, devices and options that would fit."""

from __future__ import annotations

import re

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.flavours import flavour_of
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.profiles.known_models import find_model
from moreh_ap.planner.profiles.transformer_shape import profile_of
from unit.planner.search.samples import find, with_memory


def test_nothing_fits_names_memory_and_what_would():
    profile = profile_of(find_model("Llama3-70B").shape, 1024)
    ranking = find("8xMI250", 512, profile)
    assert ranking.num_fitting == 0
    with pytest.raises(PlanError) as caught:
        _ = ranking.best
    said = caught.value
    needed, available = map(float, re.findall(r"([\d.]+) GiB", said.fact))
    assert available == 0.8 * 64 < needed
    devices = int(re.search(r"(\d+) devices", said.allowed)[1])
    assert f"flavour {flavour_of(devices, 64 * 2**30)}" in said.allowed
    assert f"devices={devices}" in said.fix
    assert find(f"{devices}xMI250", 512, profile).num_fitting > 0


def test_the_suggested_batch_fits_and_one_row_more_does_not():
    cluster = with_memory(find_cluster("2xH100"), 4.0)
    settings = {"activation_recomputation": False, "num_micro_batches": 1, "pipeline_parallel": False,
                "kinds": frozenset(), "offload": False}  # fmt: skip
    with pytest.raises(PlanError) as caught:
        _ = find(cluster, 4096, **settings).best
    rows = int(re.search(r"a batch of (\d+) rows", caught.value.allowed)[1])
    assert find(cluster, rows, **settings).num_fitting
    assert not find(cluster, rows + 2, **settings).num_fitting


def test_an_option_that_keeps_it_from_fitting_is_named():
    profile = profile_of(find_model("Llama3-8B").shape, 512)
    with pytest.raises(PlanError) as caught:
        _ = find("8xH100", 8, profile, distribute_parameter=False, kinds=frozenset(), offload=False).best
    assert "distribute_parameter='auto' (it is False)" in caught.value.allowed
