"""The planner's memory of this runtime against PyTorch's tracker, on fake tensors, by `scripts/check_memory.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotating  # one more plan each

pytest.importorskip("transformers")
pytest.importorskip("peft")

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_memory.py"
LIMIT = 0.08
ADAPTERS, OWN_LOSS = " with adapters", " with its own loss"


PLANS = [
    "shard=8,precision=bf16",
    "tensor=8,precision=bf16",
    "shard=16,recompute=selective,micro_batches=2,precision=bf16",
    "shard=8,micro_batches=4,precision=bf16 with its own loss",
    "shard=8,precision=bf16 with adapters",
    "shard=8,recompute=full,precision=bf16 with adapters",
    "shard=8,micro_batches=4,precision=bf16 with adapters",
    "replicate=8 with adapters",
    "recompute=full,precision=bf16,offload=all",
    "replicate=2,shard=2,micro_batches=2,recompute=full,precision=bf16,offload=all",
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process for each plan that is about to be looked at, all at once: each takes seconds of one core."""
    items = [item for item in request.session.items if item.path == request.path]
    with ExitStack() as ending:
        runs = {}
        for plan in [item.callspec.params["plan"] for item in items]:
            command = [
                sys.executable,
                SCRIPT,
                "--model",
                "Llama2-7B",
                "--layers",
                "6",
                "--plan",
                plan.removesuffix(ADAPTERS).removesuffix(OWN_LOSS),
                *(["--lora", "16"] if plan.endswith(ADAPTERS) else []),
                *(["--own-loss", "--rows", "4"] if plan.endswith(OWN_LOSS) else []),
                "--here",
                "--json",
            ]
            run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            runs[plan] = ending.enter_context(run)
            ending.callback(run.kill)
        yield runs


@pytest.mark.parametrize("plan", PLANS)
def test_predicted_memory_is_what_the_runtime_allocates(plan: str, runs: dict[str, subprocess.Popen[str]]) -> None:
    out, error = runs[plan].communicate(timeout=200)
    assert runs[plan].returncode == 0, error
    (case,) = json.loads(out.splitlines()[-1])
    assert case["tracked_bytes"] == max(case["forward_bytes"], case["backward_bytes"], case["step_bytes"])
    assert case["predicted_bytes"] == pytest.approx(case["tracked_bytes"], rel=LIMIT)
