"""The log lines and dump files that say what was chosen."""

from __future__ import annotations

import re

from moreh_ap import log
from moreh_ap.plan import Plan
from unit.planner.search.samples import choose


def test_log_lines_are_the_platforms():
    choice = choose("2xH100", batch=8, num_micro_batches=2, kinds=frozenset(), activation_recomputation=False)
    lines = log.search_lines(choice)
    patterns = [
        rf"The number of candidates is {len(choice.candidates)}\.",
        r"Parallel Graph Compile start\.\.\.",
        r"Elapsed Time to compile all candidates = \d+ \[ms\]",
        r"Parallel Graph Compile finished\.",
        rf"The number of possible candidates is {sum(one.fits for one in choice.candidates)}\.",
        r"SelectBestGraphFromCandidates start\.\.\.",
        r"Elapsed Time to compute cost for survived candidates = \d+ \[ms\]",
        r"SelectBestGraphFromCandidates finished\.",
        r"Configuration for parallelism is selected\.",
        r"num_stages : 1, num_micro_batches : 2, batch_per_device : 2, No TP, recomputation : 0, "
        r"distribute_param : (true|false), distribute_low_prec_param : false",
    ]
    assert len(lines) == len(patterns)
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line)


def test_selected_config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = Plan(2, 2, micro_batches=4, precision="bf16")
    path = log.write_selected_config(plan, 16)
    assert path.name == "advanced_parallelization_selected_config.dump"
    first, second = (tmp_path / path).read_text().splitlines()
    assert first == plan.platform_line(16)
    assert Plan.parse(second.removeprefix("plan : ")) == plan


def test_autoconfig_file(tmp_path):
    choice = choose()
    said = log.choice_lines(choice)
    lines = log.write_autoconfig_log(choice, tmp_path / "autoconfig_log.dump").read_text().splitlines()
    assert all(line.startswith("[info] ") for line in lines)
    assert lines[: len(said)] == [f"[info] {line}" for line in said]
    assert f'plan="{choice.plan}"' in said[-1]
    candidates = lines[len(said) :]
    assert len(candidates) == len(choice.candidates)
    assert [line for line in candidates if ", selected (" in line] == [candidates[0]]
    assert all("does not fit" in line for line, one in zip(candidates, choice.candidates, strict=True) if not one.fits)
