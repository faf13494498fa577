"""`MOREH_CHECK=N`: the first steps are compared with one more worker that computes them alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from user_script import UserScript

pytestmark = pytest.mark.rotating  # one more difference each

CHECKED = re.compile(r"MOREH_CHECK=2: 2 steps compared with one device: outputs within (\S+), gradients within (\S+) ")


def run(folder: Path, *arguments: str) -> UserScript:
    return UserScript("first_steps.py", *arguments, cwd=folder, MOREH_CHECK="2")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--plan", "replicate=2"), id="replicate"),
        pytest.param(("--plan", "shard=2,micro_batches=2"), id="shard"),
        pytest.param(("--plan", "pipeline=2", "--optimizer", "own", "--dropout", "0"), id="pipeline"),
    ],
)
def test_steps_like_those_of_one_device(tmp_path: Path, arguments: tuple[str, ...]):
    with run(tmp_path, *arguments) as script:
        found = CHECKED.search(script.succeed())
        assert found, script.out
        outputs, gradients = map(float, found.groups())
        assert outputs < 1e-6 and 0 < gradients < 1e-5  # gradients of two halves of a batch are never bit-equal
        assert script.out.count("\nloss ") == 3


@pytest.mark.parametrize(
    ("wrong", "what", "module"),
    [
        ("forward", r"an output of shape \(16, 8\)", "blocks.2.dropout"),
        ("backward", r"the gradient of blocks.2.linear.bias", "blocks.2.linear"),
        ("statistics", "after the step blocks.2.seen", "blocks.2"),
    ],
)
def test_the_first_difference_ends_the_script(tmp_path: Path, wrong: str, what: str, module: str):
    with run(tmp_path, "--wrong", wrong) as script:
        assert script.wait() == 1
    assert re.search(f"ExactnessError: Step 1: {what} .* differs on 2 devices and on one", script.err), script.err
    assert f"The difference begins in the submodule {module!r}." in script.err
    assert "loss" not in script.out


def test_what_one_device_cannot_do_is_said(tmp_path: Path):
    with run(tmp_path, "--wrong", "alone") as script:
        assert script.wait() == 1
    assert "MOREH_CHECK=2: one device failed at what 2 devices did: ValueError: one device is not enough" in script.err


def test_other_random_numbers_are_refused(tmp_path: Path):
    with run(tmp_path, "--plan", "pipeline=2") as script:
        assert script.wait() == 1
    assert "UnsupportedError: MOREH_CHECK=2: a forward draws random numbers" in script.err
