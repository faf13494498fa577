"""One training in a process of its own, in one of the ways that `bench_gpu.py` compares; prints a line of JSON.

    python scripts/bench_gpu_ways.py WAY SIZE

The steps that are timed come after a warm-up of as many steps for every way: enough for the one line to have tried
compiled blocks, and to have kept them or not (40 steps of 30 ms, 12 of a second). Should its trial not have ended by
then, it goes on until that has.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from bench_gpu_profiler import RESULT, Recorded
from torch import Tensor, nn

LINE = "line"
_MOST_MORE = 100
"""Steps beyond the warm-up within which the one line has to settle."""
CHANGES = ("compiled", "fused_adamw", "cudnn_attention", "chunked_loss")
WAYS = ("plain", "fsdp", LINE, *CHANGES, "line_replicate")
"""`plain`: eager, autocast. `fsdp`: FSDP2 on a mesh of one, compiled blocks, fused AdamW. `line`: the one line. Then
`plain` with each change alone, and the one line with a plan that neither shards nor recomputes."""


@dataclass(frozen=True)
class Size:
    """A model and its batch.

    Attributes:
        family: "llama" or "gpt2".
        config: What of the configuration is not the family's default.
        rows, tokens: Of a batch.
        warm_up, timed: Steps.
    """

    family: str
    config: dict[str, Any]
    rows: int
    tokens: int
    warm_up: int = 45
    timed: int = 15


_WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
_NARROW = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {
    "8b": Size(
        "llama", {**_WIDE, "num_hidden_layers": 8, "vocab_size": 128256, "max_position_embeddings": 8192}, 1, 8192, 20
    ),
    "124m": Size("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, 8, 1024),
    "toy": Size(
        "llama", {**_NARROW, "num_hidden_layers": 2, "vocab_size": 128, "max_position_embeddings": 64}, 4, 32, 2, 3
    ),
}  # fmt: skip
"""`8b` has the width of a Llama of 8B and 8 of its layers; `toy` shows that the bench itself works."""


def flops_per_token(num_parameters: int, num_embedding: int, layers: int, width: int, tokens: int) -> float:
    """Returns the floating-point operations of a training step a token: 6 N without the embedding, 12 L H S attention.

    Args:
        num_parameters: All, a tied head counted once.
        num_embedding: Those of the input embedding; 0 if the head is tied to it.
        layers, width, tokens: Number of blocks, width of hidden states, length of a row.
    """
    return 6.0 * (num_parameters - num_embedding) + 12.0 * layers * width * tokens


def build(size: Size, device: str) -> tuple[nn.Module, float]:
    """Returns a model on the device, and the operations of a training step a token."""
    import transformers

    kinds = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "gpt2": ("GPT2Config", "GPT2LMHeadModel")}
    config_class, model_class = (getattr(transformers, name) for name in kinds[size.family])
    config = config_class(**size.config, use_cache=False)
    with torch.device(device):
        model = model_class(config)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    counts = sum(parameter.numel() for parameter in model.parameters()), 0 if head is embedding else embedding.numel()
    return model, flops_per_token(*counts, config.num_hidden_layers, config.hidden_size, size.tokens)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Returns the list of equal blocks."""
    return next(one for one in model.modules() if isinstance(one, nn.ModuleList))


def chunked_loss(model: Any, ids: Tensor, chunks: int = 8) -> Tensor:
    """Returns the mean loss of the next tokens; logits exist for a part of the tokens at a time."""
    hidden = model.base_model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten()

    def part(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model.get_output_embeddings()(rows).float(), wanted, reduction="sum")

    sums = [
        torch.utils.checkpoint.checkpoint(part, rows, wanted, use_reentrant=False)
        for rows, wanted in zip(hidden.chunk(chunks), targets.chunk(chunks))
    ]
    return torch.stack(sums).sum() / targets.numel()


def prepare(way: str, model: nn.Module, device: str) -> nn.Module:
    """Returns the model as a way trains it."""
    backend = "inductor" if device == "cuda" else "aot_eager"  # whose kernels need a compiler of C++
    blocks = blocks_of(model)
    if way in ("compiled", "fsdp"):
        for block in blocks:
            block.compile(backend=backend)
    if way == "fsdp":
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        store = dist.HashStore()
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh(device, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _surroundings(way: str, device: str) -> AbstractContextManager[Any]:
    if way == "fsdp" or way.startswith(LINE):  # their plans say in which precision to compute
        return nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.autocast(device, torch.bfloat16))
    if way == "cudnn_attention" and device == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        stack.enter_context(sdpa_kernel(order, set_priority=True))
    return stack


def _device_name(way: str, real: str) -> str:
    if real == "cpu":
        return "CPU"
    if not way.startswith(LINE):
        return torch.cuda.get_device_name()
    from moreh_ap import device as accelerators

    return str(accelerators.current().session.devices()[0].name)


def is_unsettled() -> bool:
    """Returns whether the one line still compares its first steps with what it expected, or tries compiled blocks."""
    from moreh_ap import device as accelerators

    return accelerators.current().session.watch is not None


@contextlib.contextmanager
def _recording(flag: str) -> Iterator[None]:
    with open(flag, "w"):
        pass
    yield
    os.unlink(flag)


def run(way: str, size: Size, folder: str) -> dict[str, Any]:
    """Trains, and returns what was measured."""
    real = "cuda" if torch.cuda.device_count() else "cpu"  # does not initialise CUDA
    device = real
    if way.startswith(LINE):
        options: dict[str, Any] = {"devices": 1}
        if way == "line_replicate" or real == "cpu":  # a toy would run in the script's own process otherwise
            options["plan"] = "replicate=1" + (",precision=bf16" if real == "cuda" else "")
        torch.moreh.option.enable_advanced_parallelization(**options)
        device = "cuda"
    torch.manual_seed(0)
    started_s = time.perf_counter()
    bare, flops = build(size, device)
    flag = os.path.join(folder, "record")
    model = Recorded(prepare(way, bare, device), flag)
    fused = way in ("fused_adamw", "fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **({"fused": True} if fused else {}))
    vocabulary = bare.config.vocab_size
    batches = [torch.randint(0, vocabulary, (size.rows, size.tokens)).to(device) for _ in range(4)]

    def step(number: int) -> Tensor:
        ids = batches[number % len(batches)]
        with _surroundings(way, device):
            loss = chunked_loss(bare, ids) if way == "chunked_loss" else model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    synchronize: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    losses = [step(number) for number in range(size.warm_up)]
    synchronize()
    while way.startswith(LINE) and is_unsettled():
        losses.append(step(len(losses)))
        synchronize()
        if len(losses) > size.warm_up + _MOST_MORE:
            raise RuntimeError(f"the one line has not settled within {len(losses)} steps")
    first_s = time.perf_counter() - started_s
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(size.timed + 1)] if device == "cuda" else []
    began_s, seconds = time.perf_counter(), []
    for number in range(size.timed):
        if marks:
            marks[number].record()
        step_s = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - step_s)
    if marks:
        marks[-1].record()
    synchronize()
    mean_s = (time.perf_counter() - began_s) / size.timed
    if marks:
        seconds = [one.elapsed_time(other) / 1e3 for one, other in pairwise(marks)]
    peak = torch.cuda.max_memory_reserved() if real == "cuda" else 0
    idle, compiled, longest = None, False, {}
    if way != "chunked_loss":  # whose forward is not the model's
        with _recording(flag):
            for number in range(2):
                step(number)
            synchronize()
        step(0)
        synchronize()
        with open(flag + RESULT) as file:
            recorded = json.load(file)
        idle, compiled, longest = recorded["idle"], recorded["compiled"], recorded["longest"]
    return {
        "way": way,
        "device": _device_name(way, real),
        "step_s": statistics.median(seconds),
        "mean_s": mean_s,
        "tokens_per_s": size.rows * size.tokens / mean_s,
        "flops_per_s": flops * size.rows * size.tokens / mean_s,
        "peak_reserved_bytes": peak,
        "idle": idle,
        "compiled": compiled,
        "longest": longest,
        "start_s": first_s,
        "losses": [float(loss) for loss in losses],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        found = run(sys.argv[1], SIZES[sys.argv[2]], place)
    print("BENCH " + json.dumps(found), flush=True)
