"""The rule that picks a plan, and the log and dump files that tell of it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.option import Options
from moreh_ap.plan import Plan
from moreh_ap.planner import report
from moreh_ap.planner.memory import ModelProfile, estimate_decoder_activation_bytes, estimate_memory
from moreh_ap.planner.rule import choose_plan

ELEMENTS = 1_000_000
PROFILE = ModelProfile(parameter_bytes=4 * ELEMENTS, trainable_parameters=ELEMENTS)
WHOLE_BYTES = 16 * ELEMENTS  # parameters 4, gradients 4, two averages 8


def choose(num_devices, memory, *, batch=16, profile=PROFILE, native_bf16=False, **settings):
    options = Options(**{"memory_usage_correction_ratio": 100, **settings})
    return choose_plan(profile, num_devices, memory, batch, options, native_bf16=native_bf16)


@pytest.mark.parametrize(
    ("memory", "plan"),
    [
        (WHOLE_BYTES, Plan(replicate=8)),
        (WHOLE_BYTES - 1, Plan(4, 2)),
        (WHOLE_BYTES / 2, Plan(4, 2)),
        (WHOLE_BYTES / 2 - 1, Plan(2, 4)),
        (WHOLE_BYTES / 8, Plan(1, 8)),
    ],
)
def test_least_sharding_that_fits(memory, plan):
    assert choose(8, memory).plan == plan


def test_memory_ratio_counts():
    assert choose(2, WHOLE_BYTES, memory_usage_correction_ratio=100).plan == Plan(replicate=2)
    assert choose(2, WHOLE_BYTES, memory_usage_correction_ratio=99).plan == Plan(shard=2)


def test_sizes_that_are_no_power_of_two():
    assert choose(6, WHOLE_BYTES / 3).plan == Plan(2, 3)
    assert {candidate.plan.shard for candidate in choose(6, WHOLE_BYTES).candidates} == {1, 2, 3, 6}


def test_distribute_parameter():
    assert choose(4, WHOLE_BYTES, distribute_parameter=True).plan == Plan(2, 2)
    assert choose(1, WHOLE_BYTES, distribute_parameter=True).plan == Plan()
    with pytest.raises(PlanError, match="distribute_parameter='auto'"):
        choose(4, WHOLE_BYTES / 2, distribute_parameter=False)


def test_micro_batches_come_before_sharding_when_activations_are_large():
    profile = dataclasses.replace(PROFILE, activation_bytes_per_row=ELEMENTS)
    assert choose(2, WHOLE_BYTES + 8 * ELEMENTS, profile=profile).plan == Plan(replicate=2)
    assert choose(2, WHOLE_BYTES + 2 * ELEMENTS, profile=profile).plan == Plan(replicate=2, micro_batches=4)
    assert choose(2, WHOLE_BYTES / 2 + 4 * ELEMENTS, profile=profile).plan == Plan(shard=2, micro_batches=2)


def test_micro_batches_asked_for():
    choice = choose(2, WHOLE_BYTES, num_micro_batches=3)
    assert choice.plan == Plan(replicate=2, micro_batches=3)
    assert len(choice.candidates) == 2


def test_micro_batches_end_where_rows_do():
    assert max(c.plan.micro_batches for c in choose(2, WHOLE_BYTES, batch=9).candidates) == 4
    assert [c.plan.micro_batches for c in choose(1, WHOLE_BYTES, batch=1).candidates] == [1]


@pytest.mark.parametrize(
    ("mixed", "native", "precision"), [(True, True, "bf16"), (True, False, "fp32"), (False, True, "fp32")]
)
def test_precision(mixed, native, precision):
    assert choose(1, WHOLE_BYTES, mixed_precision=mixed, native_bf16=native).plan.precision == precision


def test_forced_plan_is_taken_as_it_is():
    plan = Plan(1, 4, micro_batches=2, precision="bf16")
    choice = choose(4, WHOLE_BYTES, plan=plan)
    assert (choice.plan, len(choice.candidates)) == (plan, 1)
    tight = choose(4, 1000, plan=plan)
    assert tight.plan == plan
    assert "does not fit" in tight.reason
    with pytest.raises(PlanError, match="needs 4 devices, the accelerator has 2"):
        choose(2, WHOLE_BYTES, plan=plan)


EVERY_KIND = [
    "tensor=2,sequence_parallel=true,pipeline=2,schedule=zero_bubble",
    "pipeline=4,micro_batches=8,schedule=gpipe,recompute=full",
    "pipeline=2,schedule=interleaved,layers=1+2+3+2,replicate=2",
    "shard=2,tensor=2,recompute=3,offload=optimizer",
]


@pytest.mark.parametrize("text", EVERY_KIND)
def test_every_kind_of_plan_may_be_forced(text):
    choice = choose(4, WHOLE_BYTES, plan=Plan.parse(text))
    assert choice.plan == Plan.parse(text)
    assert choice.candidates[0].fits
    assert choice.lines[-1] == f"[info] {choice.plan.platform_line(16)}"


def test_recomputation_asked_for():
    assert choose(2, WHOLE_BYTES, activation_recomputation=True).plan == Plan(replicate=2, recompute="full")
    assert {c.plan.recompute for c in choose(2, WHOLE_BYTES, activation_recomputation=True).candidates} == {"full"}


def test_recomputation_only_where_nothing_fits_without():
    profile = dataclasses.replace(PROFILE, activation_bytes_per_row=ELEMENTS, recomputed_bytes_per_row=ELEMENTS / 10)
    settings = {"num_micro_batches": 1, "distribute_parameter": False, "profile": profile}
    assert choose(2, WHOLE_BYTES + 8 * ELEMENTS, **settings).plan == Plan(replicate=2)
    tight = WHOLE_BYTES + ELEMENTS
    choice = choose(2, tight, **settings)
    assert choice.plan == Plan(replicate=2, recompute="full")
    assert "activations are recomputed" in choice.reason
    with pytest.raises(PlanError, match="activation_recomputation='auto'"):
        choose(2, tight, activation_recomputation=False, **settings)


def test_nothing_fits_names_bytes_and_remedies():
    profile = dataclasses.replace(PROFILE, activation_bytes_per_row=2**20)
    gib = ModelProfile(parameter_bytes=4 * 2**30, trainable_parameters=2**30)
    with pytest.raises(PlanError) as caught:
        choose(2, 2 * 2**30, profile=gib)
    assert "needs 8.00 GiB on a device, 2.00 GiB are available" in caught.value.fact
    assert caught.value.allowed == "8 devices (there are 2)"
    assert "devices=8" in caught.value.fix
    with pytest.raises(PlanError, match="a batch of 3 rows") as caught:
        choose(1, WHOLE_BYTES + 3 * 2**20, batch=8, profile=profile, num_micro_batches=1)
    assert "num_micro_batches='auto'" in caught.value.allowed


def test_remedies_are_remedies():
    profile = dataclasses.replace(PROFILE, activation_bytes_per_row=2**20)
    memory = WHOLE_BYTES / 2 + 3 * 2**20
    with pytest.raises(PlanError) as caught:
        choose(2, memory, batch=64, profile=profile, num_micro_batches=1)
    rows = int(re.search(r"a batch of (\d+) rows", caught.value.allowed).group(1))
    devices = int(re.search(r"(\d+) devices \(", caught.value.allowed).group(1))
    assert choose(2, memory, batch=rows, profile=profile, num_micro_batches=1)
    assert choose(devices, memory, batch=64, profile=profile, num_micro_batches=1)
    with pytest.raises(PlanError):
        choose(2, memory, batch=rows + 1, profile=profile, num_micro_batches=1)


@pytest.mark.parametrize(("devices", "memory", "batch"), [(0, 1e9, 1), (1, 0, 1), (1, 1e9, 0)])
def test_nothing_to_plan(devices, memory, batch):
    with pytest.raises(PlanError, match="nothing to plan"):
        choose(devices, memory, batch=batch)


def test_memory_parts():
    profile = ModelProfile(
        parameter_bytes=400, trainable_parameters=50, largest_block_parameters=10, activation_bytes_per_row=7
    )
    memory = estimate_memory(profile, Plan(2, 2, micro_batches=2, precision="bf16"), 20)
    assert (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes) == (200, 100, 200)
    assert (memory.gathered_bytes, memory.activation_bytes) == (60, 21)
    assert memory.total_bytes == 581
    assert estimate_memory(profile, Plan(4), 20).gathered_bytes == 0
    assert estimate_memory(profile, Plan(1, 4), 20).gathered_bytes == 120


def test_memory_parts_of_tensor_and_pipeline():
    profile = ModelProfile(
        parameter_bytes=800, trainable_parameters=200, largest_block_parameters=10, activation_bytes_per_row=40
    )
    memory = estimate_memory(profile, Plan.parse("shard=2,tensor=2,pipeline=2,micro_batches=4"), 16)
    assert (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes) == (100, 100, 200)
    assert memory.gathered_bytes == 3 * 4 * 10 / 2
    # 2 rows a micro-batch, 2 of them under way, half the blocks, half of each block
    assert memory.activation_bytes == 40 * 2 * 2 / 2 / 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("pipeline=2,layers=3+1", 0.75),
        ("pipeline=2,schedule=interleaved,layers=1+2+1+4", 0.75),
        ("pipeline=4", 0.25),
    ],
)
def test_fullest_stage_counts(text, parts):
    assert estimate_memory(PROFILE, Plan.parse(text), 8).parameter_bytes == PROFILE.parameter_bytes * parts


@pytest.mark.parametrize(
    ("text", "micro_batches"),
    [
        ("pipeline=2,micro_batches=8,schedule=gpipe", 8),
        ("pipeline=2,micro_batches=8", 2),
        ("pipeline=2,micro_batches=8,schedule=zero_bubble", 2),
        ("pipeline=2,micro_batches=8,schedule=interleaved", 2.5),
        ("pipeline=2,micro_batches=2,schedule=interleaved", 2),
        ("micro_batches=8", 1),
    ],
)
def test_micro_batches_under_way(text, micro_batches):
    profile = dataclasses.replace(PROFILE, activation_bytes_per_row=1000)
    plan = Plan.parse(text)
    rows = 16 / plan.micro_batches
    assert estimate_memory(profile, plan, 16).activation_bytes == 1000 * rows * micro_batches / plan.pipeline


@pytest.mark.parametrize(
    ("recompute", "kept"), [("none", 100), ("selective", 60), ("full", 20), (1, 80), (2, 60), (9, 20)]
)
def test_memory_of_recomputation(recompute, kept):
    profile = dataclasses.replace(
        PROFILE,
        activation_bytes_per_row=100,
        selective_bytes_per_row=60,
        recomputed_bytes_per_row=20,
        num_blocks=4,
    )
    assert estimate_memory(profile, Plan(recompute=recompute), 1).activation_bytes == kept


def test_offloaded_state_is_not_on_the_device():
    memory = estimate_memory(PROFILE, Plan(offload="optimizer"), 1)
    assert (memory.optimizer_bytes, memory.parameter_bytes) == (0, PROFILE.parameter_bytes)


def test_activation_formula():
    shape = {"sequence": 8, "hidden": 4, "layers": 3, "heads": 2, "vocabulary": 10}
    half = estimate_decoder_activation_bytes(**shape, mixed_precision=True, stores_scores=True)
    assert half == 3 * (8 * 4 * 34 + 5 * 2 * 64) + 2 * 4 * 8 * 10
    full = estimate_decoder_activation_bytes(**shape, mixed_precision=False, stores_scores=False)
    assert full == 2 * 3 * 8 * 4 * 34 + 2 * 4 * 8 * 10
    kinds = [
        estimate_decoder_activation_bytes(**shape, mixed_precision=True, stores_scores=True, recompute=kind)
        for kind in ("none", "selective", "full")
    ]
    assert kinds[0] > kinds[1] > kinds[2] == 3 * 8 * 4 * 2 + (8 * 4 * 34 + 5 * 2 * 64) + 2 * 4 * 8 * 10


def test_log_lines_are_the_platforms():
    lines = choose(2, WHOLE_BYTES / 2, num_micro_batches=2).lines
    patterns = [
        r"The number of candidates is 2\.",
        r"Parallel Graph Compile start\.\.\.",
        r"Elapsed Time to compile all candidates = \d+ \[ms\]",
        r"Parallel Graph Compile finished\.",
        r"The number of possible candidates is 1\.",
        r"SelectBestGraphFromCandidates start\.\.\.",
        r"Elapsed Time to compute cost for survived candidates = \d+ \[ms\]",
        r"SelectBestGraphFromCandidates finished\.",
        r"Configuration for parallelism is selected\.",
        r"num_stages : 1, num_micro_batches : 2, batch_per_device : 4, No TP, recomputation : 0, "
        r"distribute_param : true, distribute_low_prec_param : false",
    ]
    assert len(lines) == len(patterns)
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(r"\[info\] " + pattern, line)


def test_start_up_lines():
    lines = report.startup_lines(["127.0.0.1:5000", "127.0.0.1:5001"], "0.1.0", 42)
    assert all(line.startswith("[info] ") for line in lines)
    assert lines[2:4] == [
        "[info] [1/2] Connecting to resources on the server (127.0.0.1:5000)...",
        "[info] [2/2] Connecting to resources on the server (127.0.0.1:5001)...",
    ]
    assert lines[5] == "[info] MoAI Accelerator is ready to use."


def test_selected_config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = Plan(2, 2, micro_batches=4, precision="bf16")
    path = report.write_selected_config(plan, 16)
    assert path.name == "advanced_parallelization_selected_config.dump"
    first, second = (tmp_path / path).read_text().splitlines()
    assert first == plan.platform_line(16)
    assert Plan.parse(second.removeprefix("plan : ")) == plan


def test_autoconfig_file(tmp_path):
    choice = choose(2, WHOLE_BYTES / 2, num_micro_batches=1)
    lines = report.write_autoconfig_log(choice, tmp_path / "autoconfig_log.dump").read_text().splitlines()
    assert lines[: len(choice.lines)] == list(choice.lines)
    assert f'plan="{choice.plan}"' in lines[len(choice.lines)]
    candidates = lines[len(choice.lines) + 1 :]
    assert [("does not fit" in line, "selected" in line) for line in candidates] == [(True, False), (False, True)]
