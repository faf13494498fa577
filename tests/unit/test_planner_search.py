"""The search: it finds the best of all plans, says why, is quick, and says what would fit where nothing does."""

from __future__ import annotations

import functools
import itertools
import re
import time
from dataclasses import fields, replace

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner import explain
from moreh_ap.planner.hardware import Cluster, Device, Link, find_cluster
from moreh_ap.planner.models import find_model
from moreh_ap.planner.profile import ModelProfile, PartProfile
from moreh_ap.planner.ranking import rank
from moreh_ap.planner.remedies import FLAVOURS, flavour_of
from moreh_ap.planner.search import INDISTINCT, Task, search, weigh
from moreh_ap.planner.shapes import TransformerShape, profile_of
from moreh_ap.planner.space import Constraints, tensor_degrees_of

SHAPE = TransformerShape(8, 1024, 4096, 16, 4, 64, 32000, name="small")
PROFILE = profile_of(SHAPE, 1024)
LIKE_ONE_LINE = {"memory_usage_correction_ratio": 80}


def with_memory(cluster, gib):
    return replace(cluster, device=replace(cluster.device, memory_bytes=gib * 2**30))


def find(cluster, batch, profile=PROFILE, **settings):
    cluster = find_cluster(cluster) if isinstance(cluster, str) else cluster
    return search(Task(profile, cluster, batch, Constraints(**{**LIKE_ONE_LINE, **settings})))


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
    weighed = [weigh(ranking.task, plan) for plan in every_plan(8, batch) if allowed(plan)]
    fitting = [candidate for candidate in weighed if candidate.fits]
    assert len(weighed) > 50
    if not fitting:
        others = [candidate.plan for candidate in ranking.candidates if candidate.fits and allowed(candidate.plan)]
        assert all(plan.offload != "none" for plan in others)
        return
    best_s = min(candidate.step.total_s for candidate in fitting)
    assert ranking.fastest.step.total_s <= best_s * 1.0001
    assert ranking.best.step.total_s <= best_s * (1 + INDISTINCT) * 1.0001


def test_candidates_are_ranked():
    ranking = find(with_memory(find_cluster("8xH100"), 6.0), 64)
    fitting = ranking.candidates[: ranking.num_fitting]
    assert 0 < len(fitting) < len(ranking.candidates)
    assert all(candidate.fits and not candidate.rejected and candidate.step for candidate in fitting)
    times = [candidate.step.total_s for candidate in fitting]
    limit_s = min(times) * (1 + INDISTINCT)
    close = sum(seconds <= limit_s for seconds in times)
    assert max(times[:close]) <= limit_s < min(times[close:], default=float("inf"))
    assert times[close:] == sorted(times[close:])
    for candidate in ranking.candidates[ranking.num_fitting :]:
        assert not candidate.fits and re.search(r"needs [\d.]+ GiB on a device, 4\.80 GiB", candidate.rejected)
    plans = [candidate.plan for candidate in ranking.candidates]
    assert len(set(plans)) == len(plans)


def test_simplest_of_what_is_as_fast():
    ranking = find("8xH100", 64)
    best, fastest = ranking.best, ranking.fastest
    assert best.step.total_s <= fastest.step.total_s * (1 + INDISTINCT)

    def num_axes(candidate):
        return sum(size > 1 for size in (candidate.plan.shard, candidate.plan.tensor, candidate.plan.pipeline))

    close = [one for one in ranking.candidates[: ranking.num_fitting]
             if one.step.total_s <= fastest.step.total_s * (1 + INDISTINCT)]  # fmt: skip
    assert num_axes(best) == min(map(num_axes, close))


def test_order_of_what_is_as_fast():
    """First fewer axes, then no recomputation, a plain order, even stages, fewer micro-batches, and time last."""
    task = Task(PROFILE, find_cluster("8xH100"), 64)
    preferred = [
        "replicate=8",
        "replicate=8,micro_batches=2",
        "replicate=8,recompute=selective",
        "replicate=4,shard=2",
        "replicate=4,pipeline=2,micro_batches=8",
        "replicate=4,pipeline=2,micro_batches=8,layers=5+3",
        "replicate=4,pipeline=2,micro_batches=8,schedule=zero_bubble",
        "replicate=4,pipeline=2,micro_batches=8,recompute=full",
        "shard=4,tensor=2",
    ]
    candidates = [weigh(task, Plan.parse(text + ",precision=bf16")) for text in preferred]
    zero = dict.fromkeys([one.name for one in fields(candidates[0].step) if one.name.endswith("_s")], 0.0)
    even = [replace(one, step=replace(one.step, **{**zero, "forward_s": 1.0 + INDISTINCT / 2 - place / 1e4}))
            for place, one in enumerate(candidates)]  # fmt: skip
    late = replace(even[0], step=replace(even[0].step, forward_s=1.0 + 2 * INDISTINCT))
    ranked, num_fitting = rank([late, *reversed(even)])
    assert num_fitting == len(even) + 1
    assert [str(one.plan) for one in ranked[:-1]] == [str(one.plan) for one in even]
    assert ranked[-1] is late


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
            tried = [weigh(ranking.task, replace(base, recompute=level)) for level in levels]
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
    seconds = []
    for _ in range(3):
        started_s = time.process_time()
        ranking = search(task)
        seconds.append(time.process_time() - started_s)
    assert len(ranking.candidates) > 2000
    assert min(seconds) < 3.0, "about 0.4 s on one core of a 2020 server"
    assert ranking.best.plan.num_devices == 1024


def test_a_large_model_is_split_and_a_small_one_is_not():
    large = find("64xMI250", 512, profile_of(find_model("Llama3-70B").shape, 1024)).best.plan
    assert large.shard * large.tensor * large.pipeline >= 16
    small = find("8xH100", 64, profile_of(find_model("SmolLM2-135M").shape, 512)).best.plan
    assert small.tensor == small.pipeline == 1


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
    bare = ModelProfile("bare", 1, 1, 1, PartProfile(), PartProfile(parameters_whole=1e6), PartProfile())
    ranking = find(CPU, 3, bare)
    assert ranking.best.plan.num_devices == 2


def test_a_batch_that_is_smaller_than_the_devices():
    assert find("8xH100", 3).best.plan.num_devices == 8


# -- where nothing fits ------------------------------------------------------------------------------------------------


def test_nothing_fits_names_bytes_and_what_would():
    profile = profile_of(find_model("Llama3-70B").shape, 1024)
    ranking = find("8xMI250", 512, profile)
    assert ranking.num_fitting == 0
    with pytest.raises(PlanError) as caught:
        _ = ranking.best
    said = caught.value
    needed, available = map(int, re.findall(r"(\d+) bytes", said.fact))
    assert available == round(0.8 * 64 * 2**30) < needed
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


def test_offload_is_the_last_resort():
    profile = profile_of(find_model("Qwen2.5-1.5B").shape, 512)
    cluster = find_cluster("1xH100")
    for gib in range(40, 4, -1):
        ranking = find(with_memory(cluster, gib), 1, profile)
        if not ranking.num_fitting:
            break
        offloads = {candidate.plan.offload for candidate in ranking.candidates if candidate.fits}
        assert len(offloads) == 1
        last = offloads.pop()
    assert last == "optimizer"
    assert not find(with_memory(cluster, gib + 1), 1, profile, offload=False).num_fitting


def test_one_plan_can_be_weighed():
    task = Task(PROFILE, with_memory(find_cluster("4xA100"), 2.0), 16)
    candidate = weigh(task, Plan(replicate=4, precision="bf16"))
    assert not candidate.fits and candidate.rejected and candidate.step.total_s > 0
    with pytest.raises(PlanError, match="there are 4"):
        weigh(task, Plan(shard=8))
    with pytest.raises(PlanError, match="too few"):
        weigh(replace(task, cluster=find_cluster("16xA100")), Plan(pipeline=16))


def test_flavours():
    assert all(int(name.split(".")[-1][:-2]) == 64 * devices for name, devices in FLAVOURS.items())
    assert flavour_of(64, 64 * 2**30) == "8xLarge.4096GB"
    assert flavour_of(385, 64 * 2**30) == flavour_of(8, 80 * 2**30) == ""


# -- why ---------------------------------------------------------------------------------------------------------------


def test_parts_add_up():
    best = find("8xH100", 64).best
    parts = explain.memory_parts(best.memory)
    assert sum(num_bytes for _, num_bytes in parts) == pytest.approx(best.memory.reserved_bytes)
    assert sum(seconds for _, seconds, _ in explain.time_parts(best.step)) == pytest.approx(best.step.total_s)


def test_sentences_name_the_figures_that_decided():
    profile = profile_of(find_model("Llama3-70B").shape, 1024)
    ranking = find("64xMI250", 512, profile)
    said = explain.sentences(ranking)
    assert said[0].startswith(f"{ranking.num_fitting} of {len(ranking.candidates)} plans fit in 51.2 GiB a device")
    plan = ranking.best.plan
    for name, used in (("a tensor axis", plan.tensor > 1), ("a pipeline", plan.pipeline > 1)):
        assert any(one.startswith(f"{'Without' if used else 'With'} {name}") for one in said)
    assert sum(int(one.split()[0]) for one in explain.left_out(ranking)) == sum(ranking.left_out.values())


def test_a_mean_without_which_nothing_fits_is_said_to_be_needed():
    profile = profile_of(find_model("Llama3-8B").shape, 512)
    ranking = find("8xH100", 8, profile, kinds=frozenset())
    assert any(one.startswith("Without sharded parameters nothing fits: ") for one in explain.sentences(ranking))


def test_differences_name_the_largest_first():
    task = Task(PROFILE, find_cluster("8xH100"), 64)
    first, second = (weigh(task, Plan(replicate=8, recompute=kind, precision="bf16")) for kind in ("none", "full"))
    assert next(explain.differences(first, second)).startswith("recomputation +")
    assert list(explain.differences(first, first)) == []


@pytest.mark.parametrize("settings", [{}, LIKE_ONE_LINE])
def test_less_usable_memory_leaves_leaner_plans(settings):
    task = Task(PROFILE, find_cluster("8xA100"), 64, Constraints(**settings))
    largest = search(task).best.memory.reserved_bytes
    limited = task.with_usable(0.9 * largest)
    assert limited.usable_bytes == pytest.approx(0.9 * largest)
    assert search(limited).best.memory.reserved_bytes <= 0.9 * largest
    assert task.with_usable(2 * task.usable_bytes).usable_bytes == task.usable_bytes, "never more than there is"
