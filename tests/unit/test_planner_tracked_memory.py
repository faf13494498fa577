"""The planner's memory of this runtime against PyTorch's tracker, on fake tensors, by `scripts/check_memory.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_memory.py"
LIMIT = 0.08


@pytest.mark.parametrize(
    "plan",
    [
        "shard=8,precision=bf16",
        "tensor=8,precision=bf16",
        "shard=16,recompute=selective,micro_batches=2,precision=bf16",
    ],
)
def test_predicted_memory_is_what_the_runtime_allocates(plan: str) -> None:
    command = [sys.executable, str(SCRIPT), "--model", "Llama2-7B", "--layers", "6", "--plan", plan, "--here", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout.splitlines()[-1])
    assert case["tracked_bytes"] == max(case["forward_bytes"], case["backward_bytes"], case["step_bytes"])
    assert case["predicted_bytes"] == pytest.approx(case["tracked_bytes"], rel=LIMIT)
