"""The controller's memory does not grow with the checkpoint: only workers read weights, each its own part."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from user_script import UserScript

MB = 10**6
# 67 MB a layer in float32.
LAYER = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
VOCABULARY = 1024


def write_checkpoint(folder: Path, num_layers: int) -> int:
    """Writes a Llama with random weights, a file a layer as large models have it; returns its size in bytes.

    Layer by layer, so that the test itself never holds the model.
    """
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=num_layers, tie_word_embeddings=False, **LAYER)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    file_of = {name: (re.findall(r"layers\.(\d+)\.", name) or ["rest"])[0] + ".safetensors" for name in shapes}
    for file in sorted(set(file_of.values())):
        names = [name for name in shapes if file_of[name] == file]
        weights = {name: torch.empty(shapes[name]).uniform_(-0.02, 0.02) for name in names}
        save_file(weights, folder / file, metadata={"format": "pt"})
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def peak_bytes(folder: Path, checkpoint: Path) -> int:
    with UserScript("load_and_step.py", checkpoint, cwd=folder) as script:
        out = script.succeed(timeout_s=200)
    return int(re.search(r"peak (\d+)", out)[1]) * 1024


@pytest.mark.slow
def test_the_controller_s_peak_does_not_grow_with_the_checkpoint(tmp_path):
    peaks = []
    for num_layers, at_least_bytes in ((2, 100 * MB), (23, 1500 * MB)):
        folder = tmp_path / f"layers-{num_layers}"
        try:
            written = write_checkpoint(folder, num_layers)
            assert at_least_bytes < written < at_least_bytes + 100 * MB
            peaks.append(peak_bytes(tmp_path, folder))
        finally:
            shutil.rmtree(folder)
    print("peak of the controller, MB:", [round(peak / MB) for peak in peaks])
    assert peaks[1] < peaks[0] + 200 * MB


@pytest.mark.slow
def test_a_worker_s_peak_is_its_share_while_it_loads(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    written = write_checkpoint(checkpoint, num_layers=44)
    assert 2900 * MB < written < 3100 * MB
    for plan in ("tensor=4", "pipeline=4"):
        with UserScript("load_under_plan.py", checkpoint, plan, cwd=tmp_path) as script:
            out = script.succeed(timeout_s=200)
        peaks = [int(found) for found in re.findall(r"worker peak (\d+)", out)]
        print(plan, "peak of each worker, MB:", [round(peak / MB) for peak in peaks])
        assert len(peaks) == 4 and max(peaks) < 1.3 * written / 4 + 600 * MB
    shutil.rmtree(checkpoint)
