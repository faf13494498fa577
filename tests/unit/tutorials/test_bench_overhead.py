"""The benchmark's arithmetic: pairs, medians, what is accepted, and failures that are told."""

from __future__ import annotations

import argparse
from pathlib import Path

import bench_overhead
import psutil
import pytest
from bench_overhead import Pair, RunFailed, compare, measured, run, run_pair, show
from rich.console import Console

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
    assert not show(console, [*pairs, Pair("fsdp2", ours=1.04, theirs=1.0, loss_difference=0.0)], "steps")


def test_both_runs_of_a_pair_get_the_same_flags_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake_run(script: str, flags: list[str], workers: int, threads: int, timeout_s: float) -> dict:
        calls.append((script, flags))
        return {**REPORT, "losses": [2.0, 1.0 if script == "fsdp2" else 1.1]}

    monkeypatch.setattr(bench_overhead, "run", fake_run)
    args = argparse.Namespace(layers=1, hidden=64, batch_size=4, block_size=8, steps=5, bf16=True, workers=2, threads=1,
                              timeout=1.0)  # fmt: skip
    pair = run_pair(args, "steps", "fsdp2", ours_first=True)
    run_pair(args, "steps", "fsdp2", ours_first=False)
    assert [script for script, _ in calls] == ["one_line", "fsdp2", "fsdp2", "one_line"]
    assert calls[0][1] == [*calls[1][1], "--plan", "shard=2"]
    assert "--bf16" in calls[1][1]
    assert pair.loss_difference == pytest.approx(0.1)


def test_a_run_that_fails_is_told_with_its_output() -> None:
    with pytest.raises(RunFailed, match=r"status 2(?s:.*)multiple of 64"):
        run("one_line", ["--hidden", "65"], workers=1, threads=1, timeout_s=120)


def test_a_run_that_takes_too_long_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(bench_overhead, "SCRIPTS", tmp_path)
    with pytest.raises(RunFailed, match="took more than 8 s"):
        run("ddp", [], workers=2, threads=1, timeout_s=8)
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]
