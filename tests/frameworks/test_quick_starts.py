"""Quick starts of frameworks, with and without the one line: the same numbers, and no batch that is computed whole.

`make test-frameworks` makes an environment for each group and runs this file in it; a quick start whose framework is
not installed is in another group and is left out.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from drop_in_runs import assert_same
from user_script import UserScript

SCRIPTS = Path(__file__).parent / "scripts"
NEEDS = {
    "accelerate_loop.py": "sentence_transformers",
    "bitsandbytes_optimizers.py": "bitsandbytes",
    "bitsandbytes_qlora.py": "bitsandbytes",
    "diffusers_unet.py": "diffusers",
    "fastai_tabular.py": "fastai",
    "fastai_vision.py": "fastai",
    "gpytorch_regression.py": "gpytorch",
    "graph_batches.py": "torch_geometric",
    "graph_nodes.py": "torch_geometric",
    "graph_pooling.py": "torch_geometric",
    "ignite_trainer.py": "ignite",
    "keras_functional.py": "keras",
    "keras_loop.py": "keras",
    "lightning_fabric.py": "lightning",
    "lightning_gan.py": "lightning",
    "lightning_metrics.py": "lightning",
    "lightning_resumes.py": "lightning",
    "lightning_trainer.py": "lightning",
    "masked_language_model.py": "sentence_transformers",
    "metric_learning.py": "pytorch_metric_learning",
    "monai_unet.py": "monai",
    "open_clip_contrastive.py": "open_clip",
    "peft_adapters.py": "sentence_transformers",
    "pyro_regression.py": "pyro",
    "pyro_vae.py": "pyro",
    "sentence_fit.py": "sentence_transformers",
    "sentence_pairs.py": "sentence_transformers",
    "seq2seq_trainer.py": "sentence_transformers",
    "skorch_classifier.py": "skorch",
    "speech_wav2vec2.py": "sentence_transformers",
    "speech_whisper.py": "sentence_transformers",
    "stable_baselines.py": "stable_baselines3",
    "stable_baselines_continuous.py": "stable_baselines3",
    "timm_resnet.py": "timm",
    "timm_vit.py": "timm",
    "torchao_optimizers.py": "torchao",
    "torchao_training.py": "torchao",
    "torchrl_ppo.py": "torchrl",
    "torchrl_sac.py": "torchrl",
    "torchvision_detection.py": "timm",
    "torchvision_one_stage.py": "timm",
    "torchvision_segmentation.py": "timm",
    "transformers_clip.py": "sentence_transformers",
    "transformers_t5.py": "sentence_transformers",
    "transformers_vit.py": "sentence_transformers",
    "ultralytics_yolo.py": "ultralytics",
}
"""What each script imports beside what this package needs; those of transformers, PEFT, Accelerate are in its group."""

WHOLE = {
    "graph_nodes.py": "one graph has no rows that are independent",
    "ultralytics_yolo.py": "targets lie flat and name their picture, the loss is divided by sums over the batch",
}
"""Scripts with a call that every worker computes whole, and why. This table may only shrink."""

TIMEOUT_S = 280.0  # both together within the limit of a test in the Makefile
NAMED_NUMBER = re.compile(r"\b(?!in )[A-Za-z_]\w* -?\d+\.\d+(?=[\s,]|$)")
NOT_OF_THE_SCRIPT = re.compile(r"^\[info\]|\|")

HERE = [script for script, module in NEEDS.items() if importlib.util.find_spec(module) is not None]


def test_every_quick_start_is_listed():
    assert set(NEEDS) == {path.name for path in SCRIPTS.glob("*.py")} and WHOLE.keys() <= NEEDS.keys()


@pytest.mark.parametrize("script", HERE)
def test_a_quick_start_prints_what_it_prints_without_the_line(script, tmp_path):
    strict = {} if script in WHOLE else {"MOREH_STRICT": "1"}
    path = SCRIPTS / script
    with (
        UserScript(path, cwd=tmp_path) as reference,
        UserScript(path, "--ap", cwd=tmp_path, MOREH_NUM_DEVICES="2", **strict) as ours,
    ):
        expected, printed = (_losses(one.succeed(TIMEOUT_S)) for one in (reference, ours))
    assert len(expected) > 1, "the quick start prints losses or metrics"
    assert_same(printed, expected)


def _losses(out: str) -> list[str]:
    """Lines with a word and its number ("loss 0.25"), as scripts print them: frameworks print tables and times too."""
    return [line for line in out.splitlines() if NAMED_NUMBER.search(line) and not NOT_OF_THE_SCRIPT.search(line)]
