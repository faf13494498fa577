"""Workers that are killed or run out of memory on one of two hosts, and hosts that are lost with their part of a
checkpoint: others take over, and every number is that of an undisturbed run.

The same script and the same faults as in `test_recovery.py`, on two agents that were started by hand on loopback.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_lab import ROOT, loopback_agents
from test_leaner_plan import run_out
from user_script import UserScript

import moreh_ap
from moreh_ap.plan import Plan

SCRIPT = "survive_losses.py"
OF_WORKER = r"Worker \d of \d \(process \d+\) on 127\.0\.0\.1:\d+ died: killed by signal 9, Killed"
OF_HOST = r"The host 127\.0\.0\.1:\d+ is lost, and the workers on it \([\d, ]+\): the connection has ended"
HANGS = (
    r"Worker \d of 2 \(process \d+\) on 127\.0\.0\.1:\d+ (?:has been stopped by a signal for \d s \(SIGSTOP\)|"
    r"has waited in \w+ for \d s, which will never end \(worker \d in \w+\))\. The stacks of all workers are in the log"
)
LARGE = "1024"
"""Rows of a batch that goes ahead of its command to the memory of each host."""

FEW = 4
"""More steps than a copy after every step leaves to be computed again."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with loopback_agents(tmp_path_factory.mktemp("agents")) as found:
        yield found


@pytest.fixture
def variables(hosts: str) -> Iterator[dict[str, str]]:
    """Variables of the script: the hosts, and folders for its faults and for temporary files."""
    with tempfile.TemporaryDirectory(prefix="fatal-") as fatal, tempfile.TemporaryDirectory(prefix="t-") as temporary:
        folders = {"FATAL_FOLDER": fatal, "TMPDIR": temporary}
        yield {**folders, "MOREH_HOSTS": hosts, "MOREH_RECOVERY": "memory", "ROWS": LARGE}


def run(variables: dict[str, str], folder: Path, plan: str, *faults: str) -> str:
    """Runs the script and compares; returns what it printed."""
    with UserScript(SCRIPT, plan, *faults, cwd=folder, **variables) as script:
        out = script.succeed(timeout_s=280)
    for fault in faults:
        found = re.search(rf"^{fault}: (\d+) of (\d+) equal, [\d.]+ s\nleft over: \[\]$", out, re.MULTILINE)
        assert found and int(found[1]) == int(found[2]) > 20, f"{fault}\n{out}"
    return out


def survive(variables: dict[str, str], folder: Path, plan: str, *faults: str, how: str = OF_WORKER) -> list[int]:
    """Runs the script and compares; returns how many steps were computed again after each loss."""
    out = run(variables, folder, plan, *faults)
    steps = re.findall(rf"^\[info\] {how}\. Others took over: (\d+) steps? (?:was|were) computed", out, re.MULTILINE)
    assert len(steps) == out.count("Others took over") >= len(faults), out
    assert out.count("MoAI Accelerator is ready") == 1, "one line is all that the script sees of a loss"
    return list(map(int, steps))


@pytest.mark.rotating
def test_workers_that_die_on_a_host_of_sharded_training_go_on_from_the_copies_of_their_host(variables, tmp_path):
    faults = "backward", "snapshot", "two", "idle"
    assert max(survive({**variables, "SNAPSHOT_STEPS": "1"}, tmp_path, "shard=2", *faults)) <= FEW


@pytest.mark.rotating
def test_copies_are_on_the_disk_of_a_host_with_little_memory(variables, tmp_path):
    """The other one keeps them in memory, and is lost in the end: all workers go on from what is on that disk."""
    (tmp_path / "sitecustomize.py").write_text(
        "from moreh_ap.runtime.recovery import copy_memory\ncopy_memory.free_memory = lambda: 1000\n"
    )
    short = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with loopback_agents(tmp_path, first=short) as hosts:
        on_two = {**variables, "MOREH_HOSTS": hosts, "SNAPSHOT_STEPS": "1"}
        faults = "backward", "snapshot", "two", "agent", "backward"
        out = run(on_two, tmp_path, "shard=2", *faults)
        steps = [int(found) for found in re.findall(r"Others took over: (\d+) step", out)]
        assert len(steps) >= len(faults) and max(steps) <= FEW, out
        (line,) = re.findall(r"^.*are on disk: (.*)$", out, re.MULTILINE)
        assert re.match(r"on 127\.0\.0\.1:\d+, two need .* MiB, more than 40% of .* and are files in /", line), out


@pytest.mark.rotating
def test_several_workers_a_host_in_replicated_training(variables, tmp_path):
    faults = "forward", "optimizer", "again"
    assert max(survive({**variables, "SNAPSHOT_STEPS": "1"}, tmp_path, "replicate=4", *faults)) <= FEW


@pytest.mark.rotating  # one more loss each
def test_workers_that_hang_on_another_host_are_found_with_all_stacks_and_replaced(variables, tmp_path):
    """Here 4 s without progress count as a hang."""
    out = run({**variables, "HANG_S": "4"}, tmp_path, "shard=2", "stopped", "collective")
    taken_over = re.findall(
        rf"^\[info\] {HANGS}\. Others took over: \d+ steps? (?:was|were) computed", out, re.MULTILINE
    )
    assert len(taken_over) == 2, out
    head = r"^\[warning\] Worker (\d) of 2 \(process \d+\) on 127\.0\.0\.1:\d+, its Python stacks:\n(.*?)(?=^\[|\Z)"
    stacks = re.findall(head, out, re.MULTILINE | re.DOTALL)
    assert [rank for rank, _ in stacks] == ["0", "1"] * 2
    assert all("moreh_ap" in text for _, text in stacks) and all(
        "survive_losses.py" in text for _, text in stacks[1::2]
    )


@pytest.mark.rotating
@pytest.mark.parametrize("steps", [None, "1"], ids=["before a copy", "after copies"])
def test_a_lost_host_leaves_its_workers_to_the_other_one(variables, tmp_path, steps):
    either = f"(?:{OF_HOST}|{OF_WORKER})"
    found = survive({**variables, "SNAPSHOT_STEPS": steps}, tmp_path, "shard=2", "agent", "backward", how=either)
    assert len(found) == 2


@pytest.mark.rotating
@pytest.mark.parametrize("plan", ["shard=2,tensor=2", "shard=2,pipeline=2,micro_batches=2"])
def test_another_plan_is_for_the_workers_that_are_left_where_not_all_have_room_on_one_host(variables, tmp_path, plan):
    with UserScript("lose_a_host.py", plan, cwd=tmp_path, **variables) as script:
        out = script.succeed(timeout_s=280)
    line = rf"{OF_HOST}\. 127\.0\.0\.1:\d+ has 2 GPUs, for 4 workers\. Others took over with plan=\"(.*?)\": \d+ step"
    (after,) = re.findall(line, out)
    assert Plan.parse(after).num_devices == 2, out
    found = re.search(r"^2 workers, largest difference (\S+)$", out, re.MULTILINE)
    assert found and float(found[1]) < 1e-4, out


@pytest.mark.rotating
def test_others_under_a_leaner_plan_take_over_on_the_same_hosts_where_memory_runs_out(variables, tmp_path):
    """On one worker, whose host ends its workers for it, and on all, which go on until others are wanted."""
    for before, after, steps in run_out(tmp_path, "backward", "forward", SNAPSHOT_STEPS="1", **variables):
        assert before != after and steps <= 1, "a step, and what was sent since the last copy"


@pytest.mark.rotating  # one more loss each
def test_memory_that_runs_out_before_the_first_copy_leads_to_a_leaner_plan_on_the_same_hosts(variables, tmp_path):
    """On all workers at first, which then write a copy. Recovery is on from then: one worker is enough later."""
    in_a_gap = {**variables, "MOREH_RECOVERY": "auto", "FEW_COMMANDS": "0"}
    both = run_out(tmp_path, "forward", "backward", **in_a_gap)
    assert all(before != after for before, after, _ in both)
    assert both[0][2] == 0 < both[1][2], "the second time, steps since that copy"


@pytest.mark.rotating
def test_memory_that_runs_out_before_the_first_step_leads_to_the_next_plan_on_the_same_hosts(hosts, tmp_path):
    with UserScript("out_of_memory.py", "never", cwd=tmp_path) as script:
        expected = json.loads(script.succeed().splitlines()[-1])
    known = {"MOREH_AP_CACHE": str(tmp_path), "MOREH_HOSTS": hosts}
    with UserScript("out_of_memory.py", "forward", cwd=tmp_path, **known) as script:
        out = script.succeed(timeout_s=200)
    assert 'plan="replicate=2" ran out of memory' in out or 'plan="shard=2" ran out of memory' in out, out
    found = json.loads(out.splitlines()[-1])
    assert found["errors"] == [] and found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.rotating  # one more loss each
def test_a_checkpoint_whose_host_is_lost_with_its_part_is_written_once_more_or_the_one_before_stays(hosts, tmp_path):
    folder = tmp_path / "checkpoint"
    with UserScript("saves_and_loses_a_host.py", folder, cwd=tmp_path, MOREH_HOSTS=hosts) as script:
        out = script.succeed(timeout_s=200)
        script.leaves_nothing()
    lost = r"\[info\] The host 127\.0\.0\.1:\d+ is lost, and what it has saved: the connection has ended\."
    assert re.search(rf"^{lost} It is saved once more\.$", out, re.MULTILINE), out
    assert re.findall(r"^step (\d): that of step (\d) is loaded, equal: True$", out, re.MULTILINE) == [
        ("0", "0"),
        ("1", "1"),
    ]
    stays = rf"^step 2: .*no host is left.*\n{re.escape(str(folder))} keeps the checkpoint of before, saved .* by "
    assert re.search(stays, out, re.MULTILINE), out
    assert moreh_ap.load(folder)["step"] == 1
    files = sorted(path.name.partition("-")[2] for path in folder.glob("*.safetensors*"))
    assert files == ["worker0.safetensors", "worker1.safetensors"], "of that checkpoint alone"


@pytest.mark.rotating
def test_without_a_host_with_copies_the_run_ends_and_says_so(variables, tmp_path):
    with UserScript(SCRIPT, "shard=2", "agents", cwd=tmp_path, **{**variables, "SNAPSHOT_STEPS": "1"}) as script:
        assert script.wait() == 1
        why = rf"WorkerLostError: {OF_HOST}\. The run cannot go on: no host is left\."
        assert re.search(why, script.err), script.err
        script.leaves_nothing()
