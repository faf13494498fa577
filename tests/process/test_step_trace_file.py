"""`MOREH_TRACE` and `moreh-ap trace`: the file, read as a viewer reads it, of runs as a user starts them."""

from __future__ import annotations

import json
import re
import signal
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from user_script import SCRIPTS, UserScript

pytestmark = pytest.mark.rotating  # one more kind of run each

SCRIPT = "train_traced.py"
ROUNDING_US = 0.01


class Trace:
    """A trace file: every span with the names of its process and lane, times in microseconds."""

    def __init__(self, file: Path) -> None:
        document = json.loads(file.read_text())
        self.notes = document["otherData"]
        events = document["traceEvents"]
        names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"}
        self.processes = {pid: name for (kind, pid, _), name in names.items() if kind == "process_name"}
        self.arrows = [e for e in events if e["ph"] in "sf"]
        self.spans = [
            {
                **e,
                "process": self.processes[e["pid"]],
                "lane": names["thread_name", e["pid"], e["tid"]],
                "end": e["ts"] + e["dur"],
            }
            for e in events
            if e["ph"] == "X"
        ]

    def find(self, process: str, name: str) -> list[dict[str, Any]]:
        """Returns the spans of a process whose names match a pattern, in the order of their beginnings."""
        found = [s for s in self.spans if s["process"] == process and re.fullmatch(name, s["name"])]
        return sorted(found, key=lambda span: span["ts"])

    def check_order(self) -> None:
        """Asserts that spans of a lane are nested or apart, and all within the steps."""
        steps = self.find("controller", r"step \d+")
        assert all(before["end"] == pytest.approx(after["ts"]) for before, after in pairwise(steps))
        lanes = defaultdict(list)
        for span in self.spans:
            assert steps[0]["ts"] - ROUNDING_US <= span["ts"] <= span["end"] <= steps[-1]["end"] + ROUNDING_US, span
            lanes[span["pid"], span["tid"]].append(span)
        for spans in lanes.values():
            open_ends: list[float] = []
            for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
                while open_ends and open_ends[-1] <= span["ts"] + ROUNDING_US:
                    open_ends.pop()
                assert not open_ends or span["end"] <= open_ends[-1] + ROUNDING_US, span
                open_ends.append(span["end"])


def lines_of(text: str) -> list[int]:
    """Returns the numbers of the script's lines with a text."""
    lines = (SCRIPTS / SCRIPT).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if text in line]


def test_each_step_of_the_script_and_of_every_worker_is_on_one_time_axis(tmp_path):
    with UserScript(SCRIPT, "item", cwd=tmp_path, MOREH_TRACE="trace.json") as run:
        said = run.succeed()
        assert "MOREH_TRACE: steps 13 to 15 are in " in said and said.endswith("trained\n") and not run.err
    trace = Trace(tmp_path / "trace.json")
    trace.check_order()
    assert list(trace.processes.values()) == ["controller", "worker 0", "worker 1"]
    steps = trace.find("controller", r"step \d+")
    assert [span["name"] for span in steps] == ["step 13", "step 14", "step 15"] and trace.notes["steps"] == "13-15"
    script = "call Model", "backward", r"optimizer step \(AdamW\)", "zero_grad", "next batch of the DataLoader"
    for name in script:
        found = trace.find("controller", name)
        assert len(found) == 3, name
        assert all(step["ts"] <= span["ts"] and span["end"] <= step["end"] for step, span in zip(steps, found)), name
    for worker in ("worker 0", "worker 1"):
        for name in ("forward", "backward", "step optimizer", "all_reduce"):
            found = trace.find(worker, name)
            assert len(found) >= 3 and found[0]["ts"] > steps[0]["ts"] and found[-1]["ts"] > steps[2]["ts"], name
        assert trace.find(worker, "waiting for the next message")
    # A loss that is read is waited for at the script's line, until a worker has answered.
    waits = trace.find("controller", "waiting for the answer to .*forward.*")
    assert {span["args"]["where"].partition(":")[2] for span in waits} == set(map(str, lines_of("loss.item()")))
    for wait in waits:
        number = wait["args"]["answer_to"]
        ends = [s["end"] for s in trace.spans if s["process"] != "controller" and s["args"].get("message") == number]
        assert len(ends) == 2 and max(ends) <= wait["end"]
    # A message begins in the workers after it was sent, and an arrow joins the two.
    sent = {span["args"]["message"]: span for span in trace.find("controller", "send .*")}
    for span in trace.find("worker 1", "message"):
        number = span["args"]["message"]
        if number in sent:
            assert sent[number]["ts"] < span["ts"] and sent[number]["args"]["bytes"] > 0
    starts = {arrow["id"]: arrow for arrow in trace.arrows if arrow["ph"] == "s"}
    ends = {arrow["id"]: arrow for arrow in trace.arrows if arrow["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) >= 2 * 3
    assert all(starts[number]["ts"] < ends[number]["ts"] for number in starts)


def test_a_slow_loader_and_the_command(tmp_path):
    command = "-m", "moreh_ap.cli.main", "trace", "--first", "9", "--steps", "2", "-o", "slow.json", SCRIPT, "loader"
    with UserScript(*command, cwd=tmp_path) as run:
        assert "MOREH_TRACE: steps 9 to 10 are in " in run.succeed()
    trace = Trace(tmp_path / "slow.json")
    trace.check_order()
    loading = trace.find("controller", "next batch of the DataLoader")
    assert len(loading) == 2 and all(span["dur"] >= 8 * 20_000 for span in loading)
    for worker in ("worker 0", "worker 1"):
        idle = trace.find(worker, "waiting for the next message")
        during = [span for span in idle if any(span["ts"] < one["end"] and one["ts"] < span["end"] for one in loading)]
        assert sum(span["dur"] for span in during) > 0.3 * sum(span["dur"] for span in loading)


def test_a_model_in_the_script_s_own_process(tmp_path):
    with UserScript(SCRIPT, "own-process", cwd=tmp_path, MOREH_TRACE="own.json", MOREH_TRACE_STEPS="3") as run:
        assert "MOREH_TRACE: step 3 is in " in run.succeed()
    trace = Trace(tmp_path / "own.json")
    trace.check_order()
    names = {span["name"] for span in trace.spans if span["process"] == "controller"}
    script = "step 3", "call Model", "backward", "optimizer step (AdamW)", "zero_grad", "next batch of the DataLoader"
    assert names == set(script)
    assert {span["name"] for span in trace.spans if span["process"] != "controller"} <= {"waiting for the next message"}


def test_a_script_that_is_interrupted_leaves_what_was_recorded(tmp_path):
    with UserScript(SCRIPT, "ctrl-c", cwd=tmp_path, MOREH_TRACE="trace.json") as run:
        assert run.wait() == -signal.SIGINT
        assert "KeyboardInterrupt" in run.err and run.out.endswith("the script ended in step 15\n"), run.out
        run.leaves_nothing()
    trace = Trace(tmp_path / "trace.json")
    trace.check_order()
    assert trace.find("worker 1", "backward")


def test_a_step_that_is_never_reached_is_explained(tmp_path):
    steps = {"MOREH_TRACE": "trace.json", "MOREH_TRACE_STEPS": "100-101"}
    with UserScript(SCRIPT, "own-process", cwd=tmp_path, **steps) as run:
        run.succeed()
        said = run.err.splitlines()
    assert said[0] == "MOREH_TRACE: the script ended before step 100 began; its optimizer has stepped 16 times"
    assert said[1:] == ["Allowed: steps from 1 to 16", said[2], "See: docs/trace.md"]
    assert said[2].startswith("Try: MOREH_TRACE_STEPS=14-16 MOREH_TRACE=")
    assert json.loads((tmp_path / "trace.json").read_text()) == {"traceEvents": []}
