"""Scripts started as users start them: whole fine-tuning scripts, every way to make a model, loaders, threads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from user_files import make_files
from user_script import SCRIPTS, UserScript

pytestmark = pytest.mark.rotating  # one more kind of script each

TWO = {"MOREH_NUM_DEVICES": "2"}
ON_WORKERS = {"MOREH_PLAN": "replicate=2"}
"""Models as small as these would stay in the script's process."""
FINE_TUNING = [
    ("finetune_gpt.py", 8),
    ("finetune_mistral.py", 4),
    ("platform_llama2.py", 8),
    ("platform_llama3_70b.py", 8),
    ("platform_mistral.py", 8),
]
"""Scripts, and how many losses each prints."""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


@pytest.fixture
def folder(files, tmp_path) -> Path:
    """A working directory with models and data."""
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


WANDB = """
def note(text):
    with open(run + ".calls", "a") as file:
        print(text, file=file)

def init(id, resume, **settings):
    global run
    run = id
    note(f"init {resume}")

def log(values, step):
    note(f"log {step}")
"""


def losses_of(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([\d.]+)", output)]


def without_us(script: str) -> str:
    """The text of a script for one CPU: no line of ours, no device."""
    text = (SCRIPTS / script).read_text()
    text = re.sub(r"torch\.moreh\.option\..*", "", text).replace(".cuda()", "").replace('"cuda"', '"cpu"')
    text = text.replace("torch.cuda.synchronize(self.device)", "pass")
    assert "moreh" not in text and "cuda" not in text
    return text.replace("./tuned", "./reference")


@pytest.mark.parametrize("script, num_steps", FINE_TUNING)
def test_a_fine_tuning_script_gives_the_losses_of_one_device(folder, script, num_steps):
    from transformers import AutoModelForCausalLM

    assert "\nfrom transformers import AdamW, AutoModelForCausalLM" in without_us(script), "as older scripts have it"
    (folder / "reference.py").write_text(without_us(script))
    with (
        UserScript(script, cwd=folder, **ON_WORKERS) as tuning,
        UserScript("reference.py", cwd=folder) as reference,
    ):
        losses, expected = losses_of(tuning.succeed()), losses_of(reference.succeed())
    assert len(expected) == num_steps
    assert losses == pytest.approx(expected, rel=1e-5)
    tuned = AutoModelForCausalLM.from_pretrained(folder / "tuned")
    exact = AutoModelForCausalLM.from_pretrained(folder / "reference")
    for name, tensor in tuned.state_dict().items():
        torch.testing.assert_close(tensor, exact.state_dict()[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_training_program_with_timers_and_checkpoints_gives_the_losses_of_one_device(folder):
    """The second run goes on from the first one's checkpoint; a package in place of wandb notes what it is told."""
    (folder / "reference.py").write_text(without_us("guide_train_llm.py"))
    (folder / "wandb.py").write_text(WANDB)
    for _ in range(2):
        one, two = (("--experiment-name", name, "--num-epochs", "1") for name in ("one", "two"))
        with (
            UserScript("reference.py", *one, cwd=folder, PYTHONPATH=str(folder)) as reference,
            UserScript("guide_train_llm.py", *two, cwd=folder, PYTHONPATH=str(folder), **ON_WORKERS) as script,
        ):
            expected, losses = losses_of(reference.succeed()), losses_of(script.succeed())
        assert len(expected) == 6
        assert losses == pytest.approx(expected, rel=0.02)  # parameters are in bfloat16
    calls = (folder / "two.calls").read_text().splitlines()
    assert calls == (folder / "one.calls").read_text().splitlines()
    assert [call for call in calls if "init" in call] == ["init None", "init must"] and len(calls) == 14


def test_every_way_to_make_a_model_gives_the_numbers_of_the_cpu(tmp_path):
    with UserScript("model_ways.py", cwd=tmp_path, **TWO) as script:
        out = script.succeed()
    assert "devices 1 MoAI Accelerator" in out
    assert out.count("as on the CPU") == 9


SHORT = """
import torch
class Doubling(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)
torch.manual_seed(0)
model = Doubling(4000, 4000)  # a smaller one would stay in this process, of a busy machine too
x = torch.ones(6, 4000)
expected = model(x)
torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)
model.cuda()
print("equal", torch.allclose(model(x.cuda()).cpu(), expected, atol=1e-5))
"""


def test_scripts_without_a_file(tmp_path):
    """`python < script`, and `python -c` in the test of the log: classes of a `__main__` that has no file."""
    with UserScript("-", cwd=tmp_path, text=SHORT, **TWO) as stdin:
        assert "equal True" in stdin.succeed()


def test_processes_and_threads_of_the_script_go_on_working(tmp_path):
    with UserScript("loaders_and_threads.py", cwd=tmp_path, **TWO) as script:
        out = script.succeed()
    assert "loader processes see the accelerator: False" in out
    assert f"map: {[2 * n for n in range(10)]} calls: 10" in out
    assert "fork pool: [0, 1, 4, 9]" in out
    assert "thread: [('cuda', torch.Size([3, 2]), True)]" in out
    assert "three threads at once: 60 1" in out
    assert "no accelerator is found" not in script.err, "DataLoader(pin_memory=True) found none"


# -- on and off --------------------------------------------------------------------------------------------------------


def test_without_the_line_pytorch_is_what_it_is_without_us(tmp_path):
    def fingerprint(**variables: str) -> dict[str, object]:
        with UserScript("fingerprint.py", cwd=tmp_path, **variables) as script:
            return json.loads(script.succeed())

    bare = fingerprint(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    with_us = fingerprint(MOREH_ENABLE_ADVANCED_PARALLELIZATION="0")
    assert with_us.pop("torch.moreh") == ["module"]
    assert len(bare) > 1000
    assert with_us == bare


def test_disabling_restores_every_patched_place(tmp_path):
    with UserScript("disable.py", cwd=tmp_path) as script:
        out = script.succeed()
    assert out.count("changed after disable: []") == 2
    assert out.count("not in the registry: []") == 2
    assert "in a thread: Tensor" in out


def test_the_environment_does_what_the_line_does(tmp_path):
    code = (
        "import torch; model = torch.nn.Linear(1000, 1000).cuda(); x = torch.ones(2000, 1000).cuda();"
        "print(torch.cuda.get_device_name(), torch.cuda.device_count(), model(x).isnan().any().item())"
    )
    with UserScript("-c", code, cwd=tmp_path, MOREH_ENABLE_ADVANCED_PARALLELIZATION="1", **TWO) as script:
        out = script.succeed()
    assert "MoAI Accelerator 1 False" in out
    assert out.count("Connecting to resources") == 2


# -- what the user sees ------------------------------------------------------------------------------------------------


def test_errors_and_output_of_a_forward(tmp_path):
    with UserScript("talkative.py", cwd=tmp_path, **TWO) as script:
        code = script.wait()
        script.leaves_nothing()
    lines = [line for line in script.out.splitlines() if not line.startswith("[info]")]
    assert lines[0] == "forward says hello"
    assert lines[1] == "after the forward"
    assert lines.count("forward says hello") == 1, "printed once, though two workers ran it"
    assert lines[2].startswith("read ")
    assert lines[3] == "caught IndexError: index out of range in self"
    assert lines[4] == "caught Odd: five is odd"
    assert lines[5] == lines[2], "the workers are as good as before"
    assert code == 1
    assert script.err.endswith("Odd: five is odd\n")
    assert script.err.count("in worker 0:") == 1 and "in worker 1:" not in script.err
    assert script.err.count('raise Odd("five is odd")') == 1
    user_line = (SCRIPTS / "talkative.py").read_text().splitlines()[-1]
    assert user_line.strip() in script.err


LOG = r"""\[info\] Requesting resources for MoAI Accelerator...
\[info\] Initializing the worker daemon for MoAI Accelerator
\[info\] \[1/2\] Connecting to resources on the server \(localhost:\d+\)...
\[info\] \[2/2\] Connecting to resources on the server \(localhost:\d+\)...
\[info\] Establishing links to the resources...
\[info\] MoAI Accelerator is ready to use.
\[info\] Moreh Version: [\d.]+
\[info\] Moreh Job ID: \d+
\[info\] The number of candidates is \d+.
\[info\] Parallel Graph Compile start...
\[info\] Elapsed Time to compile all candidates = \d+ \[ms\]
\[info\] Parallel Graph Compile finished.
\[info\] The number of possible candidates is \d+.
\[info\] SelectBestGraphFromCandidates start...
\[info\] Elapsed Time to compute cost for survived candidates = \d+ \[ms\]
\[info\] SelectBestGraphFromCandidates finished.
\[info\] Configuration for parallelism is selected.
\[info\] (num_stages : 1, num_micro_batches : 1, batch_per_device : 3, .*)
\[info\] plan="(.*)" .*
"""


def test_the_log_has_the_platform_s_lines_in_their_order(tmp_path):
    with UserScript("-c", SHORT, cwd=tmp_path, **TWO) as script:
        out = script.succeed()
    assert script.err == "" and "equal True" in out
    log = "".join(line + "\n" for line in out.splitlines() if line.startswith("[info]"))
    found = re.fullmatch(LOG, log)
    assert found, log
    dump = (tmp_path / "advanced_parallelization_selected_config.dump").read_text()
    assert dump == f"{found[1]}\nplan : {found[2]}\n"


@pytest.mark.parametrize(("level", "num_lines"), [("notice", 1), ("warning", 0)])
def test_the_log_can_be_one_line_or_silent(tmp_path, level, num_lines):
    with UserScript("-c", SHORT, cwd=tmp_path, MOREH_LOG_LEVEL=level, **TWO) as script:
        out = script.succeed()
    lines = [line for line in out.splitlines() if line.startswith("[info]")]
    assert len(lines) == num_lines and all(line.startswith('[info] plan="') for line in lines)
    assert script.err == "" and "equal True" in out


def test_a_wrong_log_level_is_refused_at_the_line(tmp_path):
    with UserScript("-c", SHORT, cwd=tmp_path, MOREH_LOG_LEVEL="loud", **TWO) as script:
        assert script.wait() == 1
    assert "OptionError: environment: MOREH_LOG_LEVEL='loud'" in script.err
    assert "Allowed: debug, info, notice, warning, error" in script.err
