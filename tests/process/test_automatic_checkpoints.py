"""Scripts with MOREH_AUTOSAVE that are killed or preempted: they go on from the last checkpoint, bit for bit."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import time
import warnings
from functools import cache

import pytest
import torch
from user_script import SCRIPTS, UserScript

import moreh_ap

pytestmark = pytest.mark.rotating  # one more way to end each

STEPS = 40
KILLS = int(os.environ.get("MOREH_KILLS", "10"))
LOSS = re.compile(r"^loss (\d+) (\S+)$", re.MULTILINE)
PLANS = ["own", "replicate=2", "shard=2"]
OFTEN = {"MOREH_AUTOSAVE": "saved", "MOREH_AUTOSAVE_MINUTES": "0.005"}
SELDOM = {"MOREH_AUTOSAVE": "saved", "MOREH_AUTOSAVE_MINUTES": "60"}


def losses(out: str) -> dict[int, str]:
    return {int(step): loss for step, loss in LOSS.findall(out)}


def train(cwd, plan, ways="", steps=STEPS, **variables):
    return UserScript("saves_itself.py", steps, plan, ways, cwd=cwd, **variables)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """``uninterrupted(plan)``: the losses of a run without automatic checkpoints, which runs once."""

    @cache
    def run(plan):
        with train(tmp_path_factory.mktemp("whole"), plan) as script:
            found = losses(script.succeed())
        assert len(found) == STEPS
        return found

    return run


def goes_on(tmp_path, plan, before, uninterrupted):
    """Starts the script once more and compares both runs with an uninterrupted one; returns its first step."""
    with train(tmp_path, plan, **SELDOM) as script:
        after = losses(script.succeed())
    first = min(after)
    expected = uninterrupted(plan)
    assert before == {step: expected[step] for step in before}
    assert after == {step: expected[step] for step in range(first, STEPS)}
    return first


@pytest.mark.parametrize("plan", PLANS)
def test_a_killed_run_goes_on(tmp_path, uninterrupted, plan):
    moment = random.Random(plan).uniform(0, 0.5)
    with train(tmp_path, plan, SLEEP="0.1", **OFTEN) as script:
        script.wait_for_output("is saved in")
        time.sleep(moment)
        script.process.kill()
        script.leaves_nothing()
        before = losses(script.out)
    first = goes_on(tmp_path, plan, before, uninterrupted)
    assert 0 < first <= max(before) + 1
    assert len(list((tmp_path / "saved").glob("checkpoint*.json"))) <= 2


@pytest.mark.parametrize(("plan", "to"), [*zip(PLANS, ["the script", "the script", "all its processes"])])
def test_a_preempted_run_loses_no_step(tmp_path, uninterrupted, plan, to):
    """As Kubernetes does it, which tells the first process, and as Slurm does, which tells all."""
    with train(tmp_path, plan, SLEEP="0.1", **SELDOM) as script:
        script.wait_for_output("loss 6 ")
        for pid in script.processes() if to == "all its processes" else [script.process.pid]:
            os.kill(pid, signal.SIGTERM)
        assert script.wait(30) == -signal.SIGTERM, script.err
        script.leaves_nothing()
        before = losses(script.out)
    (step,) = re.findall(r"SIGTERM: step (\d+) is saved in", script.out)
    assert int(step) == max(before) + 1
    assert goes_on(tmp_path, plan, before, uninterrupted) == int(step)


def test_a_handler_of_the_script_runs_after_the_save(tmp_path, uninterrupted):
    with train(tmp_path, "replicate=2", "handler", SLEEP="0.1", **SELDOM) as script:
        script.wait_for_output("loss 6 ")
        script.process.terminate()
        assert script.wait(30) == 7, script.err
        script.leaves_nothing()
    assert script.out.index("SIGTERM: step") < script.out.index("my handler")
    goes_on(tmp_path, "replicate=2", losses(script.out), uninterrupted)


def test_a_run_that_is_preempted_in_a_long_evaluation_is_saved(tmp_path):
    with train(tmp_path, "replicate=2", "evaluates", **SELDOM) as script:
        script.wait_for_output("evaluates")
        began_s = time.monotonic()
        script.process.terminate()
        assert script.wait(30) == -signal.SIGTERM, script.err
    assert time.monotonic() - began_s < 25
    assert "SIGTERM: step 21 is saved in" in script.out
    assert moreh_ap.load(tmp_path / "saved")["steps"] == 21


def test_a_full_disk_does_not_end_the_training(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    script = f"import resource, signal, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10000, {limit})); "
    script += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); sys.argv = sys.argv[1:]; "
    script += "exec(compile(open(sys.argv[0]).read(), sys.argv[0], 'exec'))"
    with UserScript("-c", script, SCRIPTS / "saves_itself.py", 12, "own", "", cwd=tmp_path, **OFTEN) as run:
        out = run.succeed()
    assert len(losses(out)) == 12
    assert "nothing was saved into" in out and "File too large" in out
    assert not list((tmp_path / "saved").glob("*.safetensors"))


@pytest.mark.timeout(3600)
def test_no_kill_leaves_a_bad_checkpoint(tmp_path, uninterrupted):
    """Killed again and again, ``MOREH_KILLS`` says how often: at random moments, and in saves, as soon as the
    checkpoint before the last one is gone for it."""
    moments, first_step, during_saves = random.Random(1), 0, 0

    def is_saving():
        return first_step > 0 and not list((tmp_path / "saved").glob("checkpoint-*.json"))

    for number in range(max(2, KILLS // 5)):
        with train(tmp_path, "own", steps=100_000, SLEEP="0.01", **OFTEN) as script:
            script.wait_for_output("is saved in")
            time.sleep(moments.uniform(0, 0.5))
            while number % 2 and script.process.poll() is None and not is_saving():
                time.sleep(0.0005)
            script.process.kill()
            script.wait()
            found = losses(script.out)
            saved = [int(step) for step in re.findall(r"Step (\d+) is saved in", script.out)]
        assert "damaged" not in script.err
        assert min(found) == first_step, "it has gone on from the last checkpoint that was complete"
        expected = uninterrupted("own")
        assert all(loss == expected[step] for step, loss in found.items() if step in expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing that was written may be damaged
            first_step = moreh_ap.load(tmp_path / "saved")["steps"]
        assert first_step >= max(saved)
        during_saves += is_saving()
    assert during_saves, "none of the runs was killed while it saved"


def test_an_altered_shard_is_named_and_the_generation_before_it_is_loaded(tmp_path, uninterrupted):
    with train(tmp_path, "shard=2", steps=25, SLEEP="0.1", **OFTEN) as script:
        before = losses(script.succeed())
    folder = tmp_path / "saved"
    content = json.loads((folder / "checkpoint.json").read_text())
    (file,) = [folder / name for name in content["files"] if "worker1" in name]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (earlier,) = [json.loads(path.read_text()) for path in folder.glob("checkpoint-*.json")]
    with train(tmp_path, "shard=2", **SELDOM) as script:
        after = losses(script.succeed())
    assert f"{file.name} is damaged: its contents are not what was written" in script.err
    assert min(after) == earlier["extra"]["steps"] < content["extra"]["steps"]
    expected = uninterrupted("shard=2")
    assert before == {step: expected[step] for step in before}
    assert after == {step: expected[step] for step in after}


def test_two_runs_in_one_folder_train_on_and_leave_a_checkpoint_of_one(tmp_path, uninterrupted):
    with (
        train(tmp_path, "own", SLEEP="0.1", **OFTEN) as one,
        train(tmp_path, "own", SLEEP="0.1", **OFTEN) as two,
    ):
        runs = [losses(script.succeed()) for script in (one, two)]
    assert all(run == {step: uninterrupted("own")[step] for step in run} for run in runs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0 < moreh_ap.load(tmp_path / "saved")["steps"] < STEPS
    told = one.out + one.err + two.out + two.err
    assert "Another run saves into" in told or "which was not loaded" in told or "has been saving into" in told


def test_a_folder_of_another_run_is_told(tmp_path):
    model = torch.nn.Linear(2, 2)
    moreh_ap.save(tmp_path / "saved", model=model)
    code = "import torch; torch.moreh.option.enable_advanced_parallelization(plan='replicate=1', autosave='saved')\n"
    code += "model = torch.nn.Linear(2, 2).cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
    code += "model(torch.ones(2, 2).cuda()).sum().backward(); optimizer.step()"
    with UserScript("-c", code, cwd=tmp_path) as script:
        out = script.succeed()
    assert "has a checkpoint, saved " in out and "which was not loaded" in out
