"""What is tried on GPUs: small trainings, each under a plan, in processes of their own. Runs as a script too.

    python gpu_cases.py DEVICE PLACE NAME...    # DEVICE: cuda or cpu, PLACE: reference, or a name in PLACES

NAME is that of a training at the reference, elsewhere that of a case; without any, all of the place run. Prints one
line of JSON a case: losses and some weights of it. `reference` is the same without the one line. CPU workers stand in
where there is no GPU. Needs neither a network nor `datasets`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 3


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        training: A name in `TRAININGS`.
        plan: Its plan; empty: the planner's choice.
        tolerance: How far losses and weights may be from the reference, relative to the largest.
    """

    training: str
    plan: str
    tolerance: float = 2e-3

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"{self.training}: {self.plan or 'the planner'}"


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def _tokens(device: str, rows: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 96, (rows, 16), generator=generator).to(device) for _ in range(STEPS)]


Result = tuple[list[float], list[Tensor]]


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Tensor],
    loss_of: Callable[[Tensor], Tensor],
    scaler: torch.amp.GradScaler | None = None,
) -> Result:
    losses = []
    for batch in batches:
        loss = loss_of(batch)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], [parameter.detach().float().cpu() for parameter in model.parameters()]


def llama(device: str) -> Result:
    """Losses that the model takes, clipping, AdamW."""
    model = _llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    return _train(model, optimizer, _tokens(device), lambda ids: model(input_ids=ids, labels=ids).loss)


def scaled(device: str) -> Result:
    """Half precision with a scaler, and a fused optimizer that unscales by itself."""
    model = _llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, fused=True)
    dtype = torch.float16 if device == "cuda" else torch.bfloat16

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast(device, dtype):
            loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    return _train(model, optimizer, _tokens(device), loss_of, torch.amp.GradScaler(device, init_scale=1024.0))


def pictures(device: str) -> Result:
    """Convolutions, which cuDNN computes in TF32, and normalisation over the batch."""
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 3, 16, 16, generator=generator).to(device) for _ in range(STEPS)]
    classes = torch.arange(8, device=device)
    return _train(model, optimizer, batches, lambda x: nn.functional.cross_entropy(model(x), classes))


def own_loss(device: str) -> Result:
    """A loss that the script computes from the logits, which stay on the devices."""
    model = _llama().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return _train(model, optimizer, _tokens(device), loss_of)


class _Speaker(nn.Module):
    """Logits of a vocabulary, so many that a GPU's worker takes a loss some rows at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(96, 16), nn.Linear(16, 2**13)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).tanh())


def vocabulary(device: str, tokens: int = 2**9) -> Result:
    """A loss of the script's own: shifted, soft-capped, smoothed, with a term for large logits."""
    model = _Speaker().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(0, 96, (8, tokens + 1), generator=generator).to(device)

    def loss_of(ids: Tensor) -> Tensor:
        scores = model(ids)[:, :-1].float()
        scores = (5.0 * torch.tanh(scores / 5.0)).reshape(-1, 2**13)
        loss = nn.functional.cross_entropy(scores, ids[:, 1:].reshape(-1), label_smoothing=0.1)
        return loss + 1e-3 * scores.logsumexp(-1).pow(2).mean()

    return _train(model, optimizer, [batch], loss_of)


def saved(device: str) -> Result:
    """A checkpoint in the middle, which another model goes on from."""
    with tempfile.TemporaryDirectory() as folder:
        model = _llama().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
        first = _train(model, optimizer, _tokens(device), lambda ids: model(input_ids=ids, labels=ids).loss)
        path = os.path.join(folder, "state.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        other = _llama().to(device)
        following = torch.optim.AdamW(other.parameters(), lr=1e-2, eps=1e-6)
        state = torch.load(path, weights_only=True)
        other.load_state_dict(state["model"])
        following.load_state_dict(state["optimizer"])
        second = _train(other, following, _tokens(device), lambda ids: other(input_ids=ids, labels=ids).loss)
    return first[0] + second[0], second[1]


def asked(device: str) -> Result:
    """What a script asks `torch.cuda`: memory, streams, events; generation without gradients."""
    model = _llama().to(device).eval()
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.no_grad():
            model(input_ids=_tokens(device)[0])
        end.record()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        assert start.elapsed_time(end) >= 0.0 and 0 < free <= total
        assert torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated()
    torch.manual_seed(0)
    tokens = model.generate(_tokens(device, rows=2)[0], max_new_tokens=4, do_sample=False, pad_token_id=0)
    return [], [tokens.float().cpu()]


class _Leaving(nn.Module):
    """Leaves out layers, and rows of a layer, by numbers that are drawn on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                kept = (torch.rand(len(x), 1) < 0.8).to(x.device, x.dtype)
                x = x + kept * torch.tanh(layer(x))
        return self.head(x)


def coins(device: str) -> Result:
    """Coins that a forward flips on the CPU, on which layers are left out: workers have those of one device."""
    model = _Leaving().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(8, 32).to(device) for _ in range(2 * STEPS)]
    classes = torch.arange(8, device=device)
    torch.manual_seed(5)
    losses, weights = _train(model, optimizer, batches, lambda x: nn.functional.cross_entropy(model(x), classes))
    return [*losses, float(torch.rand([]))], weights


class _Listener(nn.Module):
    """Recurrent layers, whose weights cuDNN reads from one piece of memory, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(16, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.attention = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.recurrent(x)[0]).mean(1))


def recurrent(device: str) -> Result:
    """Recurrent layers, and the encoder layer of PyTorch."""
    model = _Listener().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-6)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 12, 16, generator=generator).to(device) for _ in range(STEPS)]
    classes = torch.arange(8, device=device)
    return _train(model, optimizer, batches, lambda x: nn.functional.cross_entropy(model(x), classes))


def compiled(device: str) -> Result:
    """A model that the script compiles."""
    model = _llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    faster = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager")
    return _train(model, optimizer, _tokens(device), lambda ids: faster(input_ids=ids, labels=ids).loss)


TRAININGS: dict[str, Callable[[str], Result]] = {
    one.__name__: one
    for one in (llama, scaled, pictures, own_loss, vocabulary, saved, asked, coins, recurrent, compiled)
}
HALF = 6e-2
"""Tolerance of half precision: rows are computed in other numbers at a time."""

_TWO = [
    Case("llama", "replicate=2"),
    Case("llama", "replicate=2,precision=bf16", HALF),
    Case("llama", "shard=2"),
    Case("llama", "tensor=2"),
    Case("llama", "tensor=2,sequence_parallel=true"),
    Case("llama", "pipeline=2,micro_batches=2"),
    Case("scaled", "shard=2", HALF),
    Case("pictures", "replicate=2"),
    Case("own_loss", "replicate=2"),
    Case("coins", "replicate=2"),
    Case("coins", "shard=2"),
    Case("coins", "replicate=2,micro_batches=2"),
    Case("recurrent", "shard=2"),
    Case("compiled", "shard=2,compile=blocks"),
    Case("llama", "shard=2,offload=optimizer"),
    Case("llama", "shard=2,offload=all"),
]
_FOUR = [Case("llama", "replicate=2,shard=2"), Case("llama", "shard=2,tensor=2"), Case("own_loss", "shard=4")]
PLACES = {
    "one": (1, [Case(name, "replicate=1", HALF if name == "scaled" else 2e-3) for name in TRAININGS]
            + [Case("llama", "replicate=1,recompute=full"), Case("llama", "replicate=1,micro_batches=2"),
               Case("llama", "replicate=1,offload=optimizer"), Case("llama", "replicate=1,offload=all"),
               Case("scaled", "replicate=1,offload=all", HALF), Case("compiled", "replicate=1,compile=blocks"),
               Case("llama", "replicate=1,precision=bf16", HALF),
               Case("pictures", "replicate=1,precision=bf16", HALF),
               Case("recurrent", "replicate=1,precision=bf16", HALF),
               Case("vocabulary", "replicate=1,precision=bf16", HALF)]),
    "shared by two": (2, _TWO),
    "shared by four": (4, [*_FOUR, Case("llama", "tensor=2,pipeline=2,micro_batches=2")]),
    "two": (2, _TWO),
    "four": (4, _FOUR),
}  # fmt: skip
"""By name: workers, and what they are tried with. Those that share a GPU talk through gloo, others through NCCL."""


def run(case: Case, device: str) -> dict[str, Any]:
    """Returns what a case gives, or its error."""
    torch.manual_seed(0)
    started_s = time.perf_counter()
    try:
        losses, weights = TRAININGS[case.training](device)
    except Exception:  # of any class: the other cases are tried all the same
        error = traceback.format_exc()
        return {"case": case.name, "error": error if len(error) < 6000 else f"{error[:3000]}\n...\n{error[-3000:]}"}
    seconds = time.perf_counter() - started_s
    sample = torch.cat([weight.flatten()[:: max(1, weight.numel() // 16)] for weight in weights]).tolist()
    return {"case": case.name, "losses": losses, "weights": sample, "seconds": seconds}


def main(device: str, place: str, *names: str) -> None:
    """Runs what is tried at a place, or what is named of it."""
    if device == "cpu":  # which takes a loss in chunks from fewer logits on, and seconds for those of a GPU
        TRAININGS["vocabulary"] = partial(vocabulary, tokens=2**7)
    if place == "reference":
        for name in names or TRAININGS:
            print(json.dumps(run(Case(name, "reference"), device)), flush=True)
        return
    from moreh_ap import device as accelerators
    from moreh_ap.accelerator.enabling import enable
    from moreh_ap.plan import Plan
    from moreh_ap.settings import Options

    num_workers, cases = PLACES[place]
    for case in [one for one in cases if not names or one.name in names]:
        wanted = Options(plan=Plan.parse(case.plan), devices=num_workers, mixed_precision=False)
        if accelerators.current() is None:
            enable(wanted)
        session = accelerators.current().session
        accelerators.current().options = session.options = wanted  # a plan is chosen at a model's first call
        print(json.dumps({**run(case, "cuda"), "workers": session.workers.device_type}), flush=True)
        if session.workers._stopped is not None:  # others after it get new workers
            accelerators.disable()
    accelerators.disable()


if __name__ == "__main__":
    main(*sys.argv[1:])
