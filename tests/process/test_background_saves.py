"""Scripts that end while a save goes on in the background: it is completed, or its error is told."""

from __future__ import annotations

import pytest
import torch
from user_script import UserScript

import moreh_ap

pytestmark = pytest.mark.rotating  # one more plan or fault each


@pytest.mark.parametrize("plan", ["", "shard=2", "replicate=2", "replicate=2,shard=2"])
def test_the_end_of_a_script_waits_for_its_save(tmp_path, plan):
    with UserScript("saves_at_its_end.py", tmp_path / "saved", plan, "", cwd=tmp_path) as script:
        assert script.succeed().endswith("the end\n")
    model = torch.nn.Linear(1024, 1024)
    weight = moreh_ap.load(tmp_path / "saved", model=model)["weight"]
    assert model.weight.sum().item() == pytest.approx(weight, rel=1e-4)
    assert len(list((tmp_path / "saved").glob("checkpoint*.json"))) == 2
    if plan:  # the workers have written equal parts, also of what all of them hold
        sizes = [file.stat().st_size for file in (tmp_path / "saved").glob("*-worker*.safetensors")]
        assert len(sizes) == (8 if "," in plan else 4) and max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize("plan", ["", "shard=2"])
def test_a_script_whose_last_save_fails_says_so(tmp_path, plan):
    with UserScript("saves_at_its_end.py", tmp_path / "saved", plan, "full", cwd=tmp_path) as script:
        assert script.wait() == 1, script.err
        script.leaves_nothing()
    assert script.out.endswith("the end\n")
    assert "The last moreh_ap.save(..., background=True) of this script failed:" in script.err
    assert "safetensors: OSError: " in script.err and "File too large" in script.err
    weight = moreh_ap.load(tmp_path / "saved")["weight"]
    assert abs(weight) < 1e5, "the earlier one"


def test_a_worker_that_is_lost_while_it_writes_ends_neither_its_save_nor_the_training(tmp_path):
    with UserScript("saves_and_loses_a_worker.py", tmp_path / "saved", cwd=tmp_path) as script:
        out = script.succeed(timeout_s=200)
    assert "Others took over" in out and "goes on: True" in out
    assert "saved as it was\n" in out
    assert moreh_ap.load(tmp_path / "saved")["step"] == 2
