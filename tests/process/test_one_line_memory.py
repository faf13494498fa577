"""The controller's memory does not grow with the checkpoint: only workers read weights, each its own part."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from user_script import UserScript

from moreh_ap.plan import Plan
from moreh_ap.planner.footprint import estimate_memory
from moreh_ap.planner.shapes import TransformerShape, profile_of

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


GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(4 * 2**20)}
"""glibc gives large blocks back when they are freed, so that a peak is what was held, not what was kept for reuse."""


def peak_bytes(folder: Path, checkpoint: Path) -> int:
    with UserScript("load_and_step.py", checkpoint, cwd=folder) as script:
        out = script.succeed(timeout_s=280)
    return int(re.search(r"peak (\d+)", out)[1]) * 1024


@pytest.mark.slow
def test_the_controller_s_peak_does_not_grow_with_the_checkpoint(tmp_path):
    peaks = []
    for num_layers, at_least_bytes in ((2, 100 * MB), (12, 800 * MB)):
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
@pytest.mark.timeout(900)
def test_a_worker_s_peak_is_its_share_while_it_loads(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    written = write_checkpoint(checkpoint, num_layers=44)
    assert 2900 * MB < written < 3100 * MB
    for plan in ("shard=4", "tensor=4", "pipeline=4"):
        with UserScript("load_under_plan.py", checkpoint, plan, cwd=tmp_path, **GIVES_BACK) as script:
            out = script.succeed(timeout_s=280)
        peaks = [int(found) for found in re.findall(r"worker peak (\d+)", out)]
        print(plan, "peak of each worker, MB:", [round(peak / MB) for peak in peaks])
        assert len(peaks) == 4 and max(peaks) < 1.3 * written / 4 + 600 * MB
    shutil.rmtree(checkpoint)


@functools.cache
def worker_peak(folder: Path, plan: str, hidden: int, layers: int, batch: int, length: int) -> int:
    with UserScript("peak_under_plan.py", plan, hidden, layers, batch, length, cwd=folder, **GIVES_BACK) as script:
        out = script.succeed(timeout_s=280)
    return max(int(found) for found in re.findall(r"worker peak (\d+)", out))


STATE = (1024, 6, 2, 8)
ACTIVATIONS = (256, 8, 32, 256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "less", "numbers"),
    [
        ("replicate=2", "shard=2", STATE),
        ("replicate=2", "replicate=2,recompute=full", ACTIVATIONS),
    ],
)
def test_what_saves_memory_saves_as_much_as_the_planner_says(tmp_path_factory, more, less, numbers):
    """Differences, so that what a process needs for itself does not count; hidden, layers, batch and length."""
    hidden, layers, batch, length = numbers
    shape = TransformerShape(layers, hidden, 4 * hidden, 8, 8, hidden // 8, 256)
    profile = profile_of(shape, length)
    predicted = [estimate_memory(profile, Plan.parse(plan), batch).allocated_bytes for plan in (more, less)]
    measured = [worker_peak(tmp_path_factory.getbasetemp(), plan, *numbers) for plan in (more, less)]
    print(f"{more} -> {less}, MB: predicted {[round(b / MB) for b in predicted]}", [round(b / MB) for b in measured])
    saved = predicted[0] - predicted[1]
    assert saved > 300 * MB
    assert 0.6 * saved < measured[0] - measured[1] < 1.4 * saved
