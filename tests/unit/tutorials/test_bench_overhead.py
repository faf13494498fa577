"""The benchmark's arithmetic: pairs, medians, what is accepted, and failures that are told."""

from __future__ import annotations

import argparse
from pathlib import Path

import bench_overhead
import psutil
import pytest
from bench_overhead import Pair, RunFailed, compare, default_plan, flags_of_plan, measured, run, run_pair, show
from rich.console import Console

from moreh_ap.plan import Plan

REPORT = {"losses": [2.0, 1.0], "step_s": [9.0, 9.0, 0.5, 0.7, 0.6], "first_step_s": 4.0}


def test_the_first_steps_are_not_counted_and_units_are_the_mode_s() -> None:
    assert measured(REPORT, "steps") == 0.6
    assert measured(REPORT, "empty") == 600.0
    assert measured(REPORT, "startup") == 4.0


def test_an_empty_model_is_compared_by_difference_and_others_by_ratio() -> None:
    pair = Pair("ddp", ours=3.0, theirs=2.0, loss_difference=0.0)
    assert compare(pair, "empty") == 1.0
    assert compare(pair, "steps") == 1.5


def test_the_result_is_the_median_of_the_ratios_within_pairs() -> None:
    console = Console(width=140, record=True, quiet=True)
    ratios = (1.0, 1.02, 5.0)
    pairs = [
        Pair("ddp", ours=ratio * speed, theirs=speed, loss_difference=0.0) for ratio, speed in zip(ratios, (1, 9, 2))
    ]
    assert show(console, pairs, "steps")
    assert not show(console, [*pairs, Pair("fsdp", ours=1.04, theirs=1.0, loss_difference=0.0)], "steps")


def test_both_runs_of_a_pair_get_the_same_flags_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake_run(script: str, flags: list[str], devices: int, threads: int, timeout_s: float) -> dict:
        calls.append((script, flags))
        return {**REPORT, "losses": [2.0, 1.0 if script == "fsdp" else 1.1]}

    monkeypatch.setattr(bench_overhead, "run", fake_run)
    args = argparse.Namespace(layers=1, hidden=64, batch_size=4, block_size=8, steps=5, bf16=True, devices=2, threads=1,
                              plan=None, timeout=1.0)  # fmt: skip
    pair = run_pair(args, "steps", "fsdp", ours_first=True)
    run_pair(args, "steps", "fsdp", ours_first=False)
    assert [script for script, _ in calls] == ["one_line", "fsdp", "fsdp", "one_line"]
    shared = ["--layers", "1", "--hidden", "64", "--batch-size", "4", "--block-size", "8", "--steps", "5", "--bf16"]
    assert calls[0][1] == [*shared, "--plan", "shard=2,precision=bf16"]
    assert calls[1][1] == [*shared, "--micro-batches", "1", "--replicate", "1"]
    assert pair.loss_difference == pytest.approx(0.1)


@pytest.mark.parametrize(
    "baseline, plan, flags",
    [
        ("ddp", "replicate=2,micro_batches=4", "--micro-batches 4"),
        ("fsdp", "replicate=2,shard=2", "--micro-batches 1 --replicate 2"),
        ("tp", "tensor=2,sequence_parallel=true", "--micro-batches 1 --sequence-parallel"),
        ("pp", "pipeline=2", "--micro-batches 2 --schedule 1f1b --split 3+3"),
        ("pp", "pipeline=2,layers=2+4,schedule=gpipe", "--micro-batches 2 --schedule gpipe --split 2+4"),
        ("3d", "shard=2,tensor=2,pipeline=2,schedule=interleaved",
         "--micro-batches 4 --replicate 1 --tensor 2 --pipeline 2 --schedule interleaved --split 1+2+2+1"
         " --stages-per-device 2"),
    ],
)  # fmt: skip
def test_the_torchrun_script_gets_the_plan_as_flags(baseline: str, plan: str, flags: str) -> None:
    assert flags_of_plan(baseline, Plan.parse(plan), num_layers=6) == flags.split()


@pytest.mark.parametrize("baseline, plan", [("ddp", "shard=2"), ("tp", "tensor=2,recompute=full"), ("pp", "tensor=2")])
def test_a_plan_that_the_script_cannot_carry_out_is_refused(baseline: str, plan: str) -> None:
    with pytest.raises(ValueError, match=rf"for {baseline} knows .* only, not"):
        flags_of_plan(baseline, Plan.parse(plan), num_layers=6)


@pytest.mark.parametrize("baseline, devices, number", [("tp", None, 2), ("ddp", 4, 4), ("3d", None, 8), ("3d", 4, 4)])
def test_a_plan_that_is_not_given_takes_the_devices(baseline: str, devices: int | None, number: int) -> None:
    assert default_plan(baseline, devices).num_devices == number


def test_a_run_that_fails_is_told_with_its_output() -> None:
    with pytest.raises(RunFailed, match=r"status 2(?s:.*)multiple of 64"):
        run("one_line", ["--hidden", "65"], devices=1, threads=1, timeout_s=120)


def test_a_run_that_takes_too_long_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train_ddp.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(bench_overhead, "SCRIPTS", tmp_path)
    with pytest.raises(RunFailed, match="took more than 8 s"):
        run("ddp", [], devices=2, threads=1, timeout_s=8)
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]
