"""`moreh-ap verify`: its default plans, exit status, and impossible requests."""

from __future__ import annotations

import pytest

from moreh_ap.cli import plan_verification, verify_command
from moreh_ap.cli.main import USAGE_STATUS, main
from moreh_ap.plan import Plan
from moreh_ap.session.verification.equivalence import Equivalence


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "llama", "--plans", "shard=0"], "shard=0 is no size"),
        (["verify", "llama", "--devices", "0"], "--devices 0"),
        (["verify", "no_such_folder", "--plans", "shard=2"], "no_such_folder is no model"),
        (["verify", "no_such_script.py", "--plans", "shard=2"], "there is no file no_such_script.py"),
    ],
)
def test_impossible_requests_end_with_the_reason(arguments, said, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(arguments) == USAGE_STATUS
    assert said in capsys.readouterr().err


def test_every_default_plan_is_for_the_devices():
    for num_devices in (1, 2, 4):
        plans = [Plan.parse(text) for text in verify_command.default_plans(num_devices)]
        assert {plan.num_devices for plan in plans} == {num_devices}
        assert len(set(plans)) == len(plans)


def test_exit_status(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    outcomes = {"verified": (0, 0), "refused": (1, 0), "wrong": (1, 1), "failed": (1, 1)}
    for verdict, statuses in outcomes.items():
        found = [Equivalence("shard=2", "verified", loss=0.0), Equivalence("tensor=2", verdict, "why")]
        monkeypatch.setattr(plan_verification, "verify_plans", lambda *_, found=found: found)
        for options, status in zip(([], ["--allow-refused"]), statuses):
            assert main(["verify", "llama", *options]) == status
        assert f"tensor=2: {verdict}: why" in capsys.readouterr().out
