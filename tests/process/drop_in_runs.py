"""Runs a whole script with and without the one line, and compares what it prints; must not know what a script does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from user_script import UserScript

NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def both(script: str, folder: Path) -> tuple[list[str], list[str]]:
    """What `script` prints for its user with the one line on two devices, and on one CPU without it."""
    with (
        UserScript(script, "--ap", cwd=folder, MOREH_NUM_DEVICES="2") as ours,
        UserScript(script, cwd=folder) as reference,
    ):
        outputs = ours.succeed(), reference.succeed()
    # Trainer's own lines hold times; `[info]` is the log of the one line.
    kept = [[line for line in out.splitlines() if line and line[0] not in "[{"] for out in outputs]
    return kept[0], kept[1]


def assert_same(ours: list[str], reference: list[str]) -> None:
    """Fails where words differ, or numbers by more than 1e-4 of their size (1e-5 where they are near zero)."""
    assert [NUMBER.sub("#", line) for line in ours] == [NUMBER.sub("#", line) for line in reference]
    for line, expected in zip(ours, reference):
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in (line, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1.1e-5), f"{line}\n{expected}"


def num_losses(lines: list[str]) -> int:
    """How many losses are printed in `lines`."""
    return sum(len(re.findall(r"loss \d", line)) for line in lines)
