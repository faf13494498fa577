"""The tutorial scripts, started as a reader starts them: the losses of one process, and what they leave."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tutorial_files import make_tutorial_files
from user_script import UserScript

pytestmark = pytest.mark.rotating  # one more tutorial each

TUTORIALS = Path(__file__).parents[2] / "tutorials"
SMALL = ["--embedded", "--epoch", "2", "--max-steps", "4", "--batch-size", "5", "--lr", "1e-3", "--log-interval", "1"]
LOOK = ["--eval-rows", "6"]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tutorials")
    make_tutorial_files(folder)
    return folder


def flags_of(name: str, files: Path, folder: Path) -> list[object]:
    """What a training script is started with, beside its plan."""
    look = LOOK if name == "train_llama3_70b" else [*LOOK, "--sample-tokens", "4"]
    if name == "train_mistral":
        return [*SMALL, *look, "--model", folder / "model", "--dataset", folder / "rows.pt"]
    special = {"train_gpt": ("gpt", "functions"), "train_lora": ("llama", "functions")}
    model, rows = special.get(name, ("llama", "summaries"))
    return [*SMALL, *look, "--block-size", "64", "--model", files / model, "--dataset", files / rows]


@pytest.mark.parametrize(
    "name, plan",
    [
        ("train_gpt", ["--plan", "replicate=2"]),
        ("train_mistral", ["--plan", "shard=2"]),
        ("train_llama2", ["--plan", "tensor=2"]),
        ("train_lora", ["--plan", "shard=2"]),
        ("train_llama3_70b", []),  # its own: 8 stages, recomputation, shards, on 8 workers
    ],
)
def test_a_script_has_the_losses_of_one_process_and_saves_an_ordinary_model(name, plan, files, tmp_path):
    from transformers import AutoModelForCausalLM

    if name == "train_mistral":
        prepare = [TUTORIALS / "prepare_mistral.py", "--model", files / "llama", "--dataset", files / "functions"]
        prepare += ["--block-size", "64", "--model-path", tmp_path / "model", "--dataset-path", tmp_path / "rows.pt"]
        with UserScript(*prepare, cwd=tmp_path) as script:
            assert "all logits of 2 x 32 tokens equal" in script.succeed()
    flags = flags_of(name, files, tmp_path)
    script = TUTORIALS / f"{name}.py"
    with (
        UserScript(script, *flags, *plan, "--save-path", tmp_path / "tuned", cwd=tmp_path) as tuning,
        UserScript(script, *flags, "--no-ap", "--save-path", tmp_path / "reference", cwd=tmp_path) as reference,
    ):
        expected_out, out = reference.succeed(), tuning.succeed()
    found, expected = (json.loads((tmp_path / part / "losses.json").read_text()) for part in ("tuned", "reference"))
    assert "MoAI Accelerator is ready" in tuning.err + out
    assert "MoAI" not in reference.err + expected_out
    assert len(expected["losses"]) == 4 and expected["held_out_after"] < expected["held_out_before"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["held_out_before"] == pytest.approx(expected["held_out_before"], rel=1e-5)
    assert found["held_out_after"] == pytest.approx(expected["held_out_after"], rel=1e-5)
    AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    if "--sample-tokens" in flags:
        assert out.split(">>>")[1] == expected_out.split(">>>")[1], "the samples before and after are the same too"


# -- train_llm ---------------------------------------------------------------------------------------------------------

LLM = TUTORIALS / "train_llm.py"


def llm_flags(files: Path, *more: object) -> list[object]:
    small = ["--embedded", "--batch-size", "3", "--block-size", "32", "--lr", "1e-3", "--log-interval", "1"]
    return [*small, "--epoch", "200", "--model", files / "gpt", "--dataset", files / "functions", *more]


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(files, tmp_path):
    """Killed in a later epoch than the first; gone on with under another plan; compared with one process."""
    exact = llm_flags(files, "--dtype", "float32", "--ckpt-freq", "10", "--save-path", tmp_path)
    one, two = [*exact, "--experiment-name", "one"], [*exact, "--experiment-name", "two"]
    with (
        UserScript(LLM, *one, "--no-ap", "--max-steps", "40", cwd=tmp_path) as whole,
        UserScript(LLM, *two, "--plan", "replicate=2", "--max-steps", "5000", cwd=tmp_path) as first,
    ):
        deadline_s = time.monotonic() + 100
        while step_of(tmp_path / "two") < 20:
            assert first.process.poll() is None and time.monotonic() < deadline_s, first.err
            time.sleep(0.02)
        first.process.kill()
        first.leaves_nothing()
        whole.succeed()
    state = json.loads((tmp_path / "two" / "state.json").read_text())
    assert state["epoch"] > 0 and state["global_step"] < 40, "the kill came too late for this test"
    with UserScript(LLM, *two, "--plan", "shard=2", "--max-steps", "40", cwd=tmp_path) as second:
        second.succeed()
    assert f"Resumed from step {state['global_step']}" in second.err
    found, expected = (json.loads((tmp_path / name / "losses.json").read_text()) for name in ("two", "one"))
    assert len(expected) == 40
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(list((tmp_path / "two").glob("step-*"))) == 1


def step_of(folder: Path) -> int:
    path = folder / "state.json"
    return json.loads(path.read_text())["global_step"] if path.exists() else 0


def test_bfloat16_parameters_and_exactly_one_run_of_wandb(files, tmp_path):
    """A package in place of wandb writes down what it is asked, in every process that imports it."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(WANDB)
    flags = llm_flags(files, "--max-steps", "6", "--save-path", tmp_path, "--wandb")
    calls = tmp_path / "calls"
    one, two = [*flags, "--experiment-name", "one"], [*flags, "--experiment-name", "two"]
    packages = {"PYTHONPATH": str(tmp_path / "packages"), "MOREH_NUM_DEVICES": "2", "HF_TOKEN": "hf_secret"}
    with (
        UserScript(LLM, *one, "--no-ap", cwd=tmp_path, **packages, CALLS=f"{calls}-one") as alone,
        UserScript(LLM, *two, cwd=tmp_path, **packages, CALLS=f"{calls}-two") as spread,
    ):
        alone.succeed()
        spread.succeed()
    found, expected = (json.loads((tmp_path / name / "losses.json").read_text()) for name in ("two", "one"))
    assert "in bfloat16" in spread.err
    assert "'MOREH_NUM_DEVICES': '2'" in spread.err and "hf_secret" not in spread.err + spread.out
    assert found == pytest.approx(expected, rel=0.02)
    assert expected[-1] < expected[0]
    lines = Path(f"{calls}-two").read_text().splitlines()
    assert lines == ["init two", *(f"log {step}" for step in range(1, 7)), "finish"]


WANDB = """
import os
def note(text):
    with open(os.environ["CALLS"], "a") as file:
        print(text, file=file)
class Run:
    def log(self, info, step):
        note(f"log {step}")
    def finish(self):
        note("finish")
def init(id, **settings):
    note(f"init {id}")
    return Run()
"""
