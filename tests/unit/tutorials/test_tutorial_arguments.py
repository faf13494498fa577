"""The command lines of the tutorial scripts: their flags and lengths, what they refuse, what they say is missing."""

from __future__ import annotations

import importlib
import runpy
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

TUTORIALS = Path(__file__).parents[3] / "tutorials"
DEFAULTS = {  # of --model, --dataset and --batch-size: without --embedded, and with it
    "train_gpt": [("cerebras/Cerebras-GPT-13B", "mlabonne/Evol-Instruct-Python-26k", 16),
                  ("smollm2-135m-instruct", "python-functions", 8)],
    "train_mistral": [("./mistral-7b", "mistral_dataset.pt", 256),
                      ("outputs/mistral-135m", "outputs/mistral_dataset.pt", 8)],
    "train_llama2": [("meta-llama/Llama-2-13b-hf", "cnn_dailymail:3.0.0", 64),
                     ("smollm2-135m-instruct", "docstring-summaries", 8)],
    "train_llama3_70b": [("meta-llama/Meta-Llama-3-70B", "cnn_dailymail:3.0.0", 512),
                         ("smollm2-135m-instruct", "docstring-summaries", 16)],
    "train_lora": [("mistralai/Mistral-7B-v0.3", "mlabonne/Evol-Instruct-Python-26k", 16),
                   ("smollm2-135m-instruct", "python-functions", 8)],
    "train_llm": [("openai-community/gpt2", "tatsu-lab/alpaca", 8), ("gpt2-small-config", "python-functions", 8)],
}  # fmt: skip
COMMON = ("--embedded", "--model", "--dataset", "--batch-size", "--lr", "--epoch", "--max-steps", "--seed",
          "--log-interval", "--save-path", "--devices", "--plan", "--no-ap")  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_help_of_every_training_script_has_the_same_flags_and_its_defaults(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no default is broken over two lines
    script = importlib.import_module(name)
    shown = {}
    for embedded in ([], ["--embedded"]):
        monkeypatch.setattr("sys.argv", [f"{name}.py", *embedded, "--help"])
        with pytest.raises(SystemExit) as ended:
            script.main()
        assert ended.value.code == 0
        shown[bool(embedded)] = " ".join(capsys.readouterr().out.split())
    for flag in COMMON:
        assert flag in shown[False]
    assert f"python tutorials/{name}.py --embedded" in shown[False]
    for is_embedded, defaults in enumerate(DEFAULTS[name]):
        for default in defaults:
            assert f"(default: {default})" in shown[is_embedded]


@pytest.mark.parametrize("name", ["inference_gpt", "inference_mistral", "inference_llama2", "inference_llama3_70b",
                                  "inference_llm", "inference_lora", "prepare_mistral"])  # fmt: skip
def test_help_of_the_other_scripts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TUTORIALS / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert f"python tutorials/{name}.py" in capsys.readouterr().out


def test_a_number_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_gpt

    monkeypatch.setattr("sys.argv", ["train_gpt.py", "--batch-size", "0"])
    with pytest.raises(SystemExit):
        train_gpt.main()
    assert "--batch-size is 0; it must be at least 1" in capsys.readouterr().err


def test_what_was_not_prepared_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import train_gpt
    import train_mistral

    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train_gpt.py", "--embedded"])
    with pytest.raises(SystemExit, match=r"prepare it with: python scripts/prepare_tutorial\.py"):
        train_gpt.main()
    monkeypatch.setattr("sys.argv", ["train_mistral.py", "--embedded"])
    with pytest.raises(SystemExit, match=r"prepare it with: python tutorials/prepare_mistral\.py --embedded"):
        train_mistral.main()


def test_the_plan_of_the_large_llama_is_shown_beside_the_published_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_llama3_70b

    monkeypatch.setattr("sys.argv", ["train_llama3_70b.py", "--show-plan"])
    with pytest.raises(SystemExit) as ended:
        train_llama3_70b.main()
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "64 x MI250" in out and 'plan="' in out and "4,062" in out
    assert f"A: {train_llama3_70b.PUBLISHED_PLAN}" in out


def test_wandb_that_is_not_installed_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tutorial_helpers

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit, match="--wandb needs the package wandb, which is not installed: pip install wandb"):
        tutorial_helpers.start_wandb(Namespace(experiment_name="x", wandb=True), tmp_path, False, [])
    silent = tutorial_helpers.start_wandb(Namespace(wandb=False), tmp_path, False, [])
    silent.log({"loss": 1.0}, step=1)
    silent.finish()


def test_an_experiment_needs_a_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import train_llm

    monkeypatch.setattr("sys.argv", ["train_llm.py"])
    with pytest.raises(SystemExit):
        train_llm.main()
    assert "the following arguments are required: --experiment-name" in capsys.readouterr().err


def test_an_inference_script_answers_with_a_saved_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {"<end>": 0, "apples": 1, "pears": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<end>").save_pretrained(tmp_path)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=3, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0))
    torch.nn.init.zeros_(model.transformer.ln_f.weight)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.eye(3, 8))
    model.transformer.ln_f.bias.data = model.transformer.wte.weight.data[2] * 100  # whatever is asked: pears
    model.save_pretrained(tmp_path)
    asked = ["--text", "apples", "--text", "pears", "--max-new-tokens", "3"]
    monkeypatch.setattr("sys.argv", ["inference_llm.py", "--model-path", str(tmp_path), *asked])
    runpy.run_path(str(TUTORIALS / "inference_llm.py"), run_name="__main__")
    pears = "pears pears pears"
    assert capsys.readouterr().out == f">>> apples\n{pears}\n\n>>> pears\n{pears}\n\n"
    monkeypatch.setattr("sys.argv", ["inference_llm.py", "--model-path", str(tmp_path / "no")])
    with pytest.raises(SystemExit, match=r"does not exist; train first: python tutorials/train_llm\.py --embedded"):
        runpy.run_path(str(TUTORIALS / "inference_llm.py"), run_name="__main__")
