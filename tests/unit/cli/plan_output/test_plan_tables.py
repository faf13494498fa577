"""The tables of `moreh-ap plan`."""

from __future__ import annotations

import json

from moreh_ap.plan import Plan
from unit.cli.samples import LARGE, show


def test_table_and_the_plan_to_paste(capsys):
    said = show(capsys, *LARGE, "--top", "3")
    assert "Llama3-70B, 70.55 billion parameters, on 64 x MI250 (8xLarge.4096GB), 8 nodes; batch 512 x 1024" in said
    assert sum(line.startswith("│") and line[1].isdigit() for line in said.splitlines()) == 3
    line = next(line for line in said.splitlines() if line.startswith('plan="'))
    plan = Plan.parse(line[6:-1])
    assert plan.num_devices == 64
    assert plan.platform_line(512) in said


def test_a_small_model_is_counted_in_millions(capsys):
    said = show(capsys, "GPT-2", "--devices", "8xA100", "--global-batch", "64")
    assert "GPT-2, 124.44 million parameters, on 8 x A100" in said


def test_a_narrow_terminal_keeps_plan_memory_and_speed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = show(capsys, *LARGE, "--top", "2")
    head = next(line for line in said.splitlines() if "s / step" in line)
    assert "GiB" in head and "tokens/s" in head and "MFU" not in head
    assert all(len(line) <= 80 for line in said.splitlines() if line and line[0] in "┏┃┡│└")


def test_explanation(capsys):
    said = show(capsys, *LARGE, "--explain")
    for word in ("parameters", "activations", "fragmentation", "bubble", "optimizer", "plans fit in 51.2 GiB a device",
                 "Without sharded parameters", "a tensor axis", "not looked at"):  # fmt: skip
        assert word in said


def test_parts_that_no_plan_has_are_left_out_of_an_explanation(capsys):
    said = show(capsys, "GPT-2", "--devices", "8xA100", "--global-batch", "64", "--explain")
    rows = [line.split("│")[2].strip() for line in said.splitlines() if line.startswith("│") and line.count("│") == 4]
    assert "forward" in rows and "optimizer" in rows
    assert not {"bubble", "pipeline messages", "tensor axis"} & set(rows)


def test_compare(capsys):
    plans = ["replicate=8,precision=bf16", "replicate=8,recompute=full,precision=bf16"]
    where = ["GPT-2", "--devices", "8xA100", "--global-batch", "64"]
    said = show(capsys, *where, "--compare", *plans)
    assert f"A: {plans[0]}" in said and f"B: {plans[1]}" in said
    assert "slower than A: recomputation +" in said
    found = json.loads(show(capsys, *where, "--json", "--compare", *plans))
    assert [one["plan"] for one in found["candidates"]] == [str(Plan.parse(text)) for text in plans]


def test_a_plan_that_does_not_fit_can_be_compared(capsys):
    said = show(capsys, *LARGE, "--compare", "replicate=64,precision=bf16", "shard=64,precision=bf16,recompute=full")
    assert "A does not fit: it needs" in said
