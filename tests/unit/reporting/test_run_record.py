"""The JSON of a report: it comes back as it was, and has no secret in it."""

from __future__ import annotations

from moreh_ap.reporting import run_record
from moreh_ap.reporting.run_record import PlanFigures, PlannedModel, RunRecord, Step


def test_a_record_comes_back_as_it_was(tmp_path):
    best, other = PlanFigures("replicate=2", 0.5, 1e9), PlanFigures("shard=2", 0.6, 5e8)
    model = PlannedModel("Llama", best, "the fastest", [other], {"parameters": 1e9}, 2e9, 8)
    steps = [Step(None, 8, 64, 1.5), Step(0.5, 8, 64)]
    record = RunRecord("train.py", "2026-11-25 10:00:00", models=[model], steps=steps)
    (tmp_path / "report.json").write_text(record.to_json())
    assert run_record.read(tmp_path / "report.json") == record


def test_secrets_are_masked():
    shown = run_record.shown_variables(
        {
            "MOREH_HOSTS": "tls://key@a",
            "MOREH_NUM_DEVICES": "2",
            "HF_TOKEN": "hf_secret",
            "AWS_SECRET_ACCESS_KEY": "s",
            "OMP_NUM_THREADS": "1",
            "HOME": "/home/me",
        }
    )
    assert shown == {"MOREH_HOSTS": "(set)", "MOREH_NUM_DEVICES": "2", "OMP_NUM_THREADS": "1"}


def test_secrets_of_the_command_line_are_masked():
    command = ["train.py", "--lr", "1e-3", "--hub-token", "hf_1", "--api_key=abc", "--push-token", "--epochs", "3"]
    shown = run_record.shown_command(command)
    assert shown == "train.py --lr 1e-3 --hub-token (set) --api_key=(set) --push-token --epochs 3"
