"""Scripts started as users start them: whole fine-tuning scripts, every way to make a model, loaders, threads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from user_files import make_files
from user_script import SCRIPTS, UserScript

TWO = {"MOREH_NUM_DEVICES": "2"}


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


def losses_of(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([\d.]+)", output)]


def without_us(script: str) -> str:
    """The text of a script for one CPU: no line of ours, no device."""
    text = (SCRIPTS / script).read_text()
    text = re.sub(r"torch\.moreh\.option\..*", "", text).replace(".cuda()", "")
    assert "moreh" not in text and "cuda" not in text
    return text.replace("./tuned", "./reference")


@pytest.mark.parametrize("script, num_steps", [("finetune_gpt.py", 8), ("finetune_mistral.py", 4)])
def test_a_fine_tuning_script_gives_the_losses_of_one_device(folder, script, num_steps):
    from transformers import AutoModelForCausalLM

    (folder / "reference.py").write_text(without_us(script))
    with UserScript(script, cwd=folder, **TWO) as tuning, UserScript("reference.py", cwd=folder) as reference:
        losses, expected = losses_of(tuning.succeed()), losses_of(reference.succeed())
    assert len(expected) == num_steps
    assert losses == pytest.approx(expected, rel=1e-5)
    tuned = AutoModelForCausalLM.from_pretrained(folder / "tuned")
    exact = AutoModelForCausalLM.from_pretrained(folder / "reference")
    for name, tensor in tuned.state_dict().items():
        torch.testing.assert_close(tensor, exact.state_dict()[name], rtol=1e-4, atol=1e-6, msg=name)
