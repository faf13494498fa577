"""Runs that save checkpoints of their own and are killed, or preempted: started again, they go on bit for bit."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from tutorial_files import make_tutorial_files
from user_script import UserScript

LLM = Path(__file__).parents[2] / "tutorials" / "train_llm.py"
LOSS = re.compile(r"^loss (\d+) (\S+)$", re.MULTILINE)
ENDS = [signal.SIGKILL, signal.SIGTERM]


@pytest.mark.rotating
def test_trainer_goes_on_from_its_checkpoint(tmp_path):
    """Twice: killed in the first epoch, preempted in the second."""
    (tmp_path / "saved").mkdir()
    with UserScript("trainer_resumes.py", "replicate=2", tmp_path / "whole", 0, cwd=tmp_path) as script:
        whole = dict(LOSS.findall(script.succeed()))
    assert len(whole) == 24
    for end, at, resumed_at in zip([*ENDS, None], (8, 17, 23), (0, 5, 15)):
        with UserScript("trainer_resumes.py", "replicate=2", tmp_path / "saved", 0.1, cwd=tmp_path) as script:
            if end is None:
                script.succeed()
            else:
                script.wait_for_output(f"loss {at} ")
                script.process.send_signal(end)
                assert script.wait() == -end, script.err
                script.leaves_nothing()
            found = dict(LOSS.findall(script.out))
        assert min(map(int, found)) == resumed_at and max(map(int, found)) >= at
        assert found == {step: whole[step] for step in found}


@pytest.mark.rotating  # one more way to end
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.name)
def test_the_tutorial_for_language_models_goes_on_from_its_checkpoint(tmp_path, end):
    make_tutorial_files(tmp_path)
    flags = ["--embedded", "--batch-size", "3", "--block-size", "32", "--lr", "1e-3", "--log-interval", "1"]
    flags += ["--epoch", "200", "--model", tmp_path / "gpt", "--dataset", tmp_path / "functions"]
    flags += ["--dtype", "float32", "--ckpt-freq", "5", "--plan", "shard=2", "--save-path", tmp_path]
    with (
        UserScript(LLM, *flags, "--experiment-name", "one", "--max-steps", "30", cwd=tmp_path) as whole,
        UserScript(LLM, *flags, "--experiment-name", "two", "--max-steps", "5000", cwd=tmp_path) as first,
    ):
        deadline_s = time.monotonic() + 120
        while not (tmp_path / "two" / "state.json").exists():
            assert first.process.poll() is None and time.monotonic() < deadline_s, first.err
            time.sleep(0.02)
        first.process.send_signal(end)
        assert first.wait() == -end, first.err
        first.leaves_nothing()
        whole.succeed()
    step = json.loads((tmp_path / "two" / "state.json").read_text())["global_step"]
    assert 0 < step < 30, "the end came too late for this test"
    with UserScript(LLM, *flags, "--experiment-name", "two", "--max-steps", "30", cwd=tmp_path) as second:
        second.succeed()
    assert f"Resumed from step {step}" in second.err
    found, expected = (json.loads((tmp_path / name / "losses.json").read_text()) for name in ("two", "one"))
    assert len(expected) == 30 and found == expected
