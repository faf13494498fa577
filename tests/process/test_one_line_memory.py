"""The controller's memory does not grow with the checkpoint: only workers read weights, each its own part."""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from one_line_models import tiny_llama
from user_script import UserScript

from moreh_ap import device
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.memory_footprint import estimate_memory
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of

pytestmark = pytest.mark.rotating  # one more measurement of memory each

MB = 10**6
VOCABULARY = 1024


def write_checkpoint(folder: Path, num_layers: int, hidden: int) -> int:
    """Writes a Llama with random weights, a file a layer as large models have it; returns its size in bytes.

    Layer by layer, so that the test itself never holds the model. A layer of width 1,024 has 67 MB, of 640 26 MB.
    """
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
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


@pytest.mark.slow
def test_the_controller_s_peak_does_not_grow_with_the_checkpoint(tmp_path):
    folders = [tmp_path / "small", tmp_path / "large"]
    for folder, num_layers, at_least_bytes in zip(folders, (1, 4), (70 * MB, 260 * MB), strict=True):
        assert at_least_bytes < write_checkpoint(folder, num_layers, hidden=1024) < at_least_bytes + 100 * MB
    with UserScript("load_and_step.py", *folders, cwd=tmp_path) as script:
        peaks = [int(kb) * 1024 for kb in re.findall(r"peak (\d+)", script.succeed(timeout_s=280))]
    for folder in folders:
        shutil.rmtree(folder)
    print("peak of the controller, MB:", [round(peak / MB) for peak in peaks])
    assert len(peaks) == 2 and peaks[1] < peaks[0] + 100 * MB


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def growth_bytes(accelerator) -> Iterator[Callable[..., list[int]]]:
    """``growth_bytes(plan, run)``: by how much the memory of each worker grew at most during ``run()``."""

    def measure(plan: str, run: Callable[[], None]) -> list[int]:
        session = accelerator(plan)
        session.workers.wait_ready()
        gc.collect()  # what earlier runs left; the workers drop it before they answer
        ids = torch.zeros(4, 2, dtype=torch.long).cuda()
        tiny_llama(layers=4).cuda()(ids, labels=ids).loss.item()  # and have what any model needs
        pids = session.workers.pids
        before = [_memory_bytes(pid, "VmRSS") for pid in pids]
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5): the peak is now what is resident
        run()
        torch.cuda.synchronize()
        return [_memory_bytes(pid, "VmHWM") - held for pid, held in zip(pids, before, strict=True)]

    device.disable()
    with pytest.MonkeyPatch.context() as patch:
        # glibc gives large blocks back when they are freed: a peak is what was held, not what was kept for reuse.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))
        yield measure
    device.disable()


def _memory_bytes(pid: int, name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1024


@pytest.mark.slow
def test_a_worker_s_peak_is_its_share_while_it_loads(growth_bytes, tmp_path):
    from transformers import AutoModelForCausalLM

    def load_and_call():
        model = AutoModelForCausalLM.from_pretrained(tmp_path).cuda()
        with torch.no_grad():
            model(input_ids=torch.zeros(4, 2, dtype=torch.long).cuda()).logits.cpu()

    written = write_checkpoint(tmp_path, num_layers=20, hidden=640)
    assert 500 * MB < written < 600 * MB
    for plan in ("shard=4", "tensor=4", "pipeline=4"):
        growth = growth_bytes(plan, load_and_call)
        print(plan, "growth of each worker, MB:", [round(grown / MB) for grown in growth])
        assert 0.8 * written / 4 < max(growth) < 1.3 * written / 4 + 100 * MB


STATE = (1024, 4, 2, 8)
ACTIVATIONS = (256, 8, 16, 256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "less", "numbers"),
    [
        ("replicate=2", "shard=2", STATE),
        ("replicate=2", "replicate=2,recompute=full", ACTIVATIONS),
    ],
)
def test_what_saves_memory_saves_as_much_as_the_planner_says(growth_bytes, more, less, numbers):
    """Differences, so that what a process needs for itself does not count; hidden, layers, batch and length."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, batch, length = numbers
    shape = TransformerShape(layers, hidden, 4 * hidden, 8, 8, hidden // 8, 256)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
    )

    def train():
        model = LlamaForCausalLM(config).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.zeros(batch, length, dtype=torch.long).cuda()
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    profile = profile_of(shape, length)
    predicted = [estimate_memory(profile, Plan.parse(plan), batch).allocated_bytes for plan in (more, less)]
    measured = [max(growth_bytes(plan, train)) for plan in (more, less)]
    print(f"{more} -> {less}, MB: predicted {[round(b / MB) for b in predicted]}", [round(b / MB) for b in measured])
    saved = predicted[0] - predicted[1]
    assert saved > 300 * MB
    assert 0.6 * saved < measured[0] - measured[1] < 1.4 * saved
