"""QLoRA with bitsandbytes under plans of the script: the numbers of one process, or the refusal."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from drop_in_runs import assert_same
from user_script import UserScript

SCRIPT = Path(__file__).parent / "scripts" / "bitsandbytes_qlora.py"
TIMEOUT_S = 280.0

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="of the group bitsandbytes")


def numbers(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.split(" ", 1)[0] in ("loss", "adapters", "tokens", "merged")]


@pytest.mark.parametrize("plan", ["shard=2", "shard=2,micro_batches=2"])
def test_it_prints_what_it_prints_without_the_line(tmp_path, plan):
    with (
        UserScript(SCRIPT, cwd=tmp_path) as reference,
        UserScript(SCRIPT, "--plan", plan, cwd=tmp_path, MOREH_NUM_DEVICES="2", MOREH_STRICT="1") as ours,
    ):
        expected, printed = (numbers(one.succeed(TIMEOUT_S)) for one in (reference, ours))
    assert len(expected) == 2 * (5 + 3)
    assert_same(printed, expected)


@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2,micro_batches=2"])
def test_other_plans_are_refused(tmp_path, plan):
    with UserScript(SCRIPT, "--plan", plan, cwd=tmp_path, MOREH_NUM_DEVICES="2") as script:
        assert script.wait(TIMEOUT_S) == 1
    assert f"PlanError: plan={plan!r} has a tensor axis or a pipeline" in script.err
    assert "Allowed: replicate and shard" in script.err and 'plan="shard=2"' in script.err
