"""The search: it finds the best of all plans, and is quick."""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import replace

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import Cluster, Device, Link, find_cluster
from moreh_ap.planner.profiles.known_models import find_model
from moreh_ap.planner.profiles.model_profile import LayerProfile, ModelProfile
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.planner.search.candidate import evaluate_plan
from moreh_ap.planner.search.constraints import Constraints
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.ranking import TIE_MARGIN
from moreh_ap.planner.search.search_space import tensor_degrees_of
from unit.planner.search.samples import LIKE_ONE_LINE, PROFILE, SHAPE, find, with_memory


@functools.cache
def every_plan(num_devices, batch):
    """All plans of four axes with the micro-batches, orders and recomputation that there are, found by trying."""
    plans = []
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for replicate, shard, tensor, pipeline in itertools.product(sizes, repeat=4):
        if replicate * shard * tensor * pipeline != num_devices or pipeline > SHAPE.num_layers:
            continue
        rows = -(-batch // (replicate * shard))
        counts = [count for count in range(1, rows + 1) if rows % count == 0]
        kinds = [("1f1b", 1)] if pipeline == 1 else [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)]
        levels = ("none", "selective", *range(1, 8), "full")
        for count, (schedule, stages), level in itertools.product(counts, kinds, levels):
            try:
                plan = Plan(
                    replicate, shard, tensor=tensor, sequence_parallel=tensor > 1, pipeline=pipeline,
                    micro_batches=count, schedule=schedule, stages_per_device=stages, recompute=level, precision="bf16",
                )  # fmt: skip
                plan.stage_ranges(SHAPE.num_layers)
            except PlanError:
                continue
            plans.append(plan)
    return plans


@functools.cache
def every_candidate(batch):
    """All plans weighed once: neither the bytes nor the seconds of a plan depend on how much memory a device has."""
    task = Task(PROFILE, find_cluster("8xH100"), batch, Constraints(**LIKE_ONE_LINE))
    return [evaluate_plan(task, plan) for plan in every_plan(8, batch)]


SPACES = {
    "all": ({}, lambda plan: True),
    "pipelines": ({"kinds": frozenset({"pipeline"}), "distribute_parameter": False},
                  lambda plan: plan.tensor == plan.shard == 1 < plan.pipeline),
    "no pipelines": ({"kinds": frozenset()}, lambda plan: plan.tensor == plan.pipeline == 1),
}  # fmt: skip
"""What the options leave, and the same as a condition."""


@pytest.mark.parametrize("gib", [80.0, 10.0, 8.0, 7.0, 6.0, 5.0, 4.0])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("batch", [32, 192])
def test_no_plan_that_was_left_out_is_faster(batch, space, gib):
    settings, allowed = SPACES[space]
    cluster = with_memory(find_cluster("8xH100"), gib)
    ranking = find(cluster, batch, tensor_degrees=tensor_degrees_of(SHAPE, 8), **settings)
    usable = {"usable_bytes": ranking.task.usable_bytes, "usable_host_bytes": ranking.task.usable_host_bytes}
    weighed = [replace(one, **usable) for one in every_candidate(batch) if allowed(one.plan)]
    assert weighed[-1] == evaluate_plan(ranking.task, weighed[-1].plan)
    fitting = [candidate for candidate in weighed if candidate.fits]
    assert len(weighed) > 50
    if not fitting:
        others = [candidate.plan for candidate in ranking.candidates if candidate.fits and allowed(candidate.plan)]
        assert all(plan.offload != "none" for plan in others)
        return
    best_s = min(candidate.step.total_s for candidate in fitting)
    assert ranking.fastest.step.total_s <= best_s * 1.0001
    assert ranking.best.step.total_s <= best_s * (1 + TIE_MARGIN) * 1.0001


def test_a_tensor_axis_over_nodes_where_nothing_else_fits():
    cluster = replace(find_cluster("4xGH200"), devices_per_node=1)
    settings = {"distribute_parameter": False, "pipeline_parallel": False, "offload": False}
    sizes = [0.25 * quarters for quarters in range(1, 40)]
    fits = [gib for gib in sizes if find(with_memory(cluster, gib), 4, **settings).num_fitting]
    tight = find(with_memory(cluster, fits[0]), 4, **settings)
    assert sizes[0] < fits[0]
    assert {candidate.plan.tensor for candidate in tight.candidates if candidate.fits} <= {2, 4}
    roomy = find(with_memory(cluster, 40), 4, **settings)
    assert {candidate.plan.tensor for candidate in roomy.candidates} == {1}


def test_less_memory_never_makes_it_faster_and_in_the_end_it_recomputes():
    cluster, before_s, seen = find_cluster("4xA100"), 0.0, set()
    for gib in (70, 24, 12, 8, 6, 5):
        fastest = find(with_memory(cluster, gib), 64).fastest
        assert fastest.step.total_s >= before_s * 0.999
        assert fastest.memory.reserved_bytes <= 0.8 * gib * 2**30
        before_s = fastest.step.total_s
        seen.add(str(fastest.plan.recompute))
    assert "none" in seen and len(seen) > 1


def test_the_fewest_blocks_that_have_to_recompute_are_found():
    cluster, counts = find_cluster("2xH100"), set()
    for gib in [0.125 * eighths for eighths in range(24, 120)]:
        ranking = find(with_memory(cluster, gib), 8, distribute_parameter=False, offload=False, num_micro_batches=2)
        for pipeline in (1, 2):
            base = Plan(2 // pipeline, pipeline=pipeline, micro_batches=2, precision="bf16")
            levels = ("none", *range(1, 8 // pipeline))
            tried = [evaluate_plan(ranking.task, replace(base, recompute=level)) for level in levels]
            fewest = next((one.plan.recompute for one in tried if one.fits), "full")
            found = {one.plan.recompute for one in ranking.candidates
                     if one.fits and one.plan == replace(base, recompute=one.plan.recompute)}  # fmt: skip
            assert found - {"selective"} <= {fewest}, gib
            counts |= found
    assert {"none", "selective"} < counts and len(counts - {"none", "selective", "full"}) > 2


def test_thousands_of_candidates_for_a_thousand_devices_in_seconds():
    shape = find_model("Llama3-70B").shape
    left = Constraints(**LIKE_ONE_LINE, tensor_degrees=tensor_degrees_of(shape, 64))
    task = Task(profile_of(shape, 4096), find_cluster("1024xH100"), 2048, left)
    for _ in range(3):  # again where other programs had the core
        started_s = time.process_time()
        ranking = search(task)
        taken_s = time.process_time() - started_s
        if taken_s < 3.0:
            break
    assert len(ranking.candidates) > 2000
    assert taken_s < 3.0, "about 0.4 s on one core of a 2020 server"
    assert ranking.best.plan.num_devices == 1024


def test_a_large_model_is_split_and_a_small_one_is_not():
    large = find("64xMI250", 512, profile_of(find_model("Llama3-70B").shape, 1024)).best.plan
    assert large.shard * large.tensor * large.pipeline >= 16
    small = find("8xH100", 64, profile_of(find_model("SmolLM2-135M").shape, 512)).best.plan
    assert small.tensor == small.pipeline == 1


def test_gradients_do_not_push_a_tensor_axis_across_nodes():
    best = find("64xH100", 512, profile_of(find_model("Llama3-70B").shape, 4096)).best.plan
    assert best.micro_batches > 1 and best.shard * best.tensor == 64 and best.tensor <= 8


def test_precision_follows_the_devices():
    assert find("4xA100", 16).best.plan.precision == "bf16"
    assert find("4xV100", 16).best.plan.precision == "fp32"
    assert find("4xA100", 16, mixed_precision=False).best.plan.precision == "fp32"


CPU = Cluster(
    Device("cpu worker", 4 * 2**30, 5e10, 5e10, 1e10, native_bf16=False, sustained=1.0),
    2,
    2,
    Link("shared memory", 1e9, 1e-4),
    Link("shared memory", 1e9, 1e-4),
)
"""Two workers on the CPU, as probes would find them."""


@pytest.mark.parametrize("num_devices", [1, 2])
def test_workers_on_the_cpu(num_devices):
    tiny = profile_of(TransformerShape(6, 64, 256, 4, 4, 16, 101, name="tiny"), 32)
    ranking = find(replace(CPU, num_devices=num_devices, devices_per_node=num_devices), 8, tiny)
    assert ranking.best.plan.num_devices == num_devices
    assert ranking.best.plan.precision == "fp32"
    assert ranking.best.plan.tensor == ranking.best.plan.pipeline == 1


def test_a_model_of_which_only_the_parameters_are_known():
    bare = ModelProfile("bare", 1, 1, 1, LayerProfile(), LayerProfile(parameters_replicated=1e6), LayerProfile())
    ranking = find(CPU, 3, bare)
    assert ranking.best.plan.num_devices == 2


def test_a_batch_that_is_smaller_than_the_devices():
    assert find("8xH100", 3).best.plan.num_devices == 8


@pytest.mark.parametrize("num_devices", [1, 7, 12])
def test_the_tightest_options_leave_a_plan(num_devices):
    for shards in (True, False):
        ranking = find(f"{num_devices}xH100", 5, distribute_parameter=shards, activation_recomputation=False,
                       pipeline_parallel=False, num_stages=1, num_micro_batches=3, kinds=frozenset())  # fmt: skip
        assert ranking.candidates
        for candidate in ranking.candidates:
            plan = candidate.plan
            assert plan.replicate * plan.shard == num_devices
            assert (plan.shard > 1) == (shards and num_devices > 1)
            assert plan.micro_batches == 3 and plan.recompute == "none"


@pytest.mark.parametrize("batch", [0, -1])
def test_nothing_to_plan(batch):
    with pytest.raises(PlanError, match="nothing to plan"):
        find("8xH100", batch)


def test_one_gpu_of_80_gb_trains_llama3_8b_with_parameters_in_host_memory():
    profile = profile_of(find_model("Llama3-8B").shape, 2048)
    ranking = find("1xH100", 8, profile)
    best = ranking.best
    assert best.plan.offload == "all" and best.plan.precision == "bf16" and best.plan.num_devices == 1
    assert best.memory.host_bytes > 16 * profile.parameters
    assert not find("1xH100", 8, profile, host_bytes=100 * 2**30).num_fitting
    (least,) = (one for one in find("1xH100", 8, profile, host_bytes=100 * 2**30).candidates[:1])
    assert "GiB of host memory for a device, 100.00 GiB are usable" in least.rejected


def test_offload_is_the_last_resort():
    profile = profile_of(find_model("Qwen2.5-1.5B").shape, 512)
    cluster, seen = find_cluster("1xH100"), []
    for gib in range(40, 2, -1):
        ranking = find(with_memory(cluster, gib), 1, profile)
        if not ranking.num_fitting:
            break
        offloads = {candidate.plan.offload for candidate in ranking.candidates if candidate.fits}
        assert len(offloads) == 1
        seen.append(offloads.pop())
    assert list(dict.fromkeys(seen)) == ["none", "optimizer", "all"]
    assert not find(with_memory(cluster, gib + 1), 1, profile, offload=False).num_fitting
