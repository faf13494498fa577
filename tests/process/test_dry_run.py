"""`moreh-ap plan train.py`, started as a user starts it: the plan of a run, and scripts that misbehave."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from tutorial_files import make_tutorial_files
from user_script import SCRIPTS, UserScript

pytestmark = pytest.mark.rotating  # one more script each

PLAN = ("-m", "moreh_ap.cli.main", "plan")
STRANGER, TRAINER = SCRIPTS / "planned_argparse.py", SCRIPTS / "planned_trainer.py"
TUTORIAL = Path(__file__).parents[2] / "tutorials" / "train_gpt.py"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "dtype": "float16",
}


def test_it_is_the_plan_that_a_run_on_this_machine_chooses(tmp_path):
    arguments = (STRANGER, "--hidden", "320", "--rows", "6")
    with UserScript(*PLAN, "--json", *arguments, cwd=tmp_path, MOREH_NUM_DEVICES="2") as asked:
        found = json.loads(asked.succeed())
        assert not asked.processes()
    with UserScript(*arguments, cwd=tmp_path, MOREH_NUM_DEVICES="2") as run:
        log = run.succeed()
    best = found["candidates"][0]
    plan, seconds, gib = re.search(r'plan="([^"]+)" \(.*: ([0-9.e-]+) s a step, ([0-9.]+) GiB', log).groups()
    assert best["plan"] == plan and found["num_devices"] == 2 and found["device"] == "CPU"
    assert f"{best['step']['total_s']:.3g}" == f"{float(seconds):.3g}"
    assert f"{best['memory']['reserved_bytes'] / 2**30:.1f}" == gib
    assert found["global_batch"] == 6 and found["sequence_length"] == 256
    assert any("takes 128 positions, and a row has 256" in note for note in found["notes"])


def test_a_configuration_is_enough_for_a_model_that_this_machine_could_not_hold(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    words = ("--devices", "8xH100-80GB", "--hosts", "4", TRAINER, "model", "out")
    with UserScript(*PLAN, *words, cwd=tmp_path) as asked:
        said = asked.succeed()
    assert "LlamaForCausalLM, 6.74 billion parameters, on 32 x H100-80GB, 4 nodes; batch 16 x 64" in said
    assert "Before its first call the script changed files: out, out/args.json." in said
    assert "Left out: save_pretrained of a model." in said and not (tmp_path / "out" / "before").exists()
    # the same model, batch and machine, asked for without a script
    same = ("model", "--devices", "8xH100-80GB", "--hosts", "4", "--global-batch", "16", "--seq-len", "64")
    with UserScript(*PLAN, *same, cwd=tmp_path) as by_name:
        plan = re.search(r'^plan=".*"$', by_name.succeed(), re.MULTILINE).group()
    assert plan in said


def test_a_tutorial_is_planned_with_its_weights_gone(tmp_path):
    make_tutorial_files(tmp_path)
    for weights in (tmp_path / "gpt").glob("*.safetensors"):
        weights.unlink()
    flags = ["--embedded", "--batch-size", "5", "--block-size", "64", "--eval-rows", "6", "--sample-tokens", "4"]
    flags += ["--model", tmp_path / "gpt", "--dataset", tmp_path / "functions", "--save-path", tmp_path / "out"]
    with UserScript(*PLAN, "--devices", "4xA100", TUTORIAL, *flags, cwd=tmp_path) as asked:
        said = asked.succeed()
    assert re.search(r"on 4 x A100-80GB, 1 node; batch \d+ x \d+", said) and 'plan="' in said
    assert "asks for no gradients" in said, "its first call takes the loss of held-out rows"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((STRANGER, "--devices", "8xH100"), "it exited with 2 before a model was called"),
        (("--devices", "8xH100", STRANGER, "--hidden", "321"), r"ended with an error \(line \d+\)"),
        (("--seq-len", "8", "--devices", "8xH100", STRANGER), "--seq-len with a script, whose own lines say it"),
        (("--devices", "8xH100", "no_such.py"), "there is no file no_such.py"),
    ],
)
def test_misuse_is_explained_in_four_lines_without_secrets(words, said, tmp_path):
    with UserScript(*PLAN, *words, *("--api-key", "very-secret") * (STRANGER in words), cwd=tmp_path) as asked:
        assert asked.process.wait(120) == 2
    assert re.search(said, asked.err) and len(asked.err.splitlines()) == 4
    assert "very-secret" not in asked.err + asked.out


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)


def test_ctrl_c_ends_the_script_and_all_that_it_started(tmp_path):
    with UserScript(*PLAN, "--devices", "8xH100", STRANGER, "--waits", cwd=tmp_path) as asked:
        wait_for_file(tmp_path / "child")
        asked.process.send_signal(signal.SIGINT)
        assert asked.process.wait(60) == 130 and asked.err.endswith("stopped\n")
        assert not asked.processes()


def test_a_killed_command_leaves_no_script_behind(tmp_path):
    with UserScript(*PLAN, "--devices", "8xH100", STRANGER, "--waits", cwd=tmp_path) as asked:
        wait_for_file(tmp_path / "child")
        (planned,) = (
            one for one in psutil.Process(asked.process.pid).children() if "plan_script" in " ".join(one.cmdline())
        )
        asked.process.kill()
        assert asked.process.wait(60) == -signal.SIGKILL
        planned.wait(10)
