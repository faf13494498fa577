"""The pictures of `moreh-ap plan`."""

from __future__ import annotations

import sys

import pytest

from moreh_ap.cli.plan_output import plan_pictures
from moreh_ap.errors import UnsupportedError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.profiles.known_models import find_model
from moreh_ap.planner.profiles.transformer_shape import profile_of
from moreh_ap.planner.search.candidate import evaluate_plan
from moreh_ap.planner.search.planning_task import Task
from unit.cli.samples import show

TASK = Task(profile_of(find_model("Cerebras-GPT-13B").shape, 1024), find_cluster("32xMI250"), 64)
PIPED = evaluate_plan(TASK, Plan(1, 8, pipeline=4, micro_batches=8, precision="bf16"))


def test_memory_bars_are_as_long_as_the_memory():
    lines = [line.plain for line in plan_pictures.memory_lines(TASK, PIPED, 100)]
    assert len(lines) == 1 + 4 + 1
    for position, line in enumerate(lines[1:-1]):
        used_gib = float(line.split()[-1])
        assert line.startswith(f"device {position:>2} ")
        assert line.count("█") + line.count("·") == 100
        assert line.count("█") == pytest.approx(used_gib / 64 * 100, abs=1.01)
    assert max(float(line.split()[-1]) for line in lines[1:-1]) == round(PIPED.memory.reserved_bytes / 2**30, 1)


def test_timeline_begins_and_ends_with_the_first_device():
    lines = [line.plain[10:] for line in plan_pictures.timeline_lines(TASK, PIPED, 100)][1:]
    assert len(lines) == 4 and {len(line) for line in lines} == {100}
    assert lines[0][0] == "0" and not lines[0].endswith("·")
    waits = [len(line) - len(line.lstrip("·")) for line in lines]
    assert waits == sorted(waits) and waits[0] == 0 < waits[1]
    for line in lines:  # a forward and a backward of every micro-batch
        assert sorted(line.replace("·", "").replace(" ", "")) == sorted("0123456701234567")


def test_a_long_timeline_shows_its_ends():
    long = evaluate_plan(TASK, Plan(1, 1, pipeline=32, micro_batches=64, precision="bf16"))
    lines = [line.plain for line in plan_pictures.timeline_lines(TASK, long, 100)][1:]
    assert len(lines) == plan_pictures.MOST_DEVICES_SHOWN
    assert all(" … " in line and len(line) <= 120 for line in lines)
    assert lines[-1].startswith("device 31")


def test_terminal_pictures(capsys):
    assert "without a pipeline" in show(capsys, "GPT-2", "--devices", "8xA100", "--picture")
    said = show(capsys, "Cerebras-GPT-13B", "--devices", "32xMI250", "--global-batch", "64", "--picture", "--compare",
                str(PIPED.plan))  # fmt: skip
    assert "usable: 51.2 of 64.0 GiB" in said and "% idle" in said


@pytest.mark.parametrize("plan", [str(PIPED.plan), "shard=32,precision=bf16"])
def test_png(capsys, tmp_path, plan):
    pytest.importorskip("matplotlib", reason="matplotlib draws the image; it comes with the extra `tutorials`")
    path = tmp_path / "plan.png"
    show(capsys, "Cerebras-GPT-13B", "--devices", "32xMI250", "--global-batch", "64", "--compare", plan, "--picture",
         str(path))  # fmt: skip
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


def test_png_without_matplotlib_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        plan_pictures.save_picture(TASK, PIPED, tmp_path / "plan.png")
