"""What each process does in the tests of recomputation, and the models for them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallelizer_jobs import CPU, Runner
from parallelizer_models import ROWS, make_batch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moreh_ap.parallelizer.data.recompute import apply_recompute
from moreh_ap.parallelizer.surroundings.placement import OwnDevice
from moreh_ap.parallelizer.trial.dry_run import NoDropout
from moreh_ap.plan import Plan

LENGTH, VOCABULARY, WIDTH = 12, 61, 16


class OwnBlock(nn.Module):
    """A block of nobody's library: a mean over the batch, a device named by hand, an in-place activation."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.activation = nn.ELU(inplace=True)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, *, hidden: Tensor, note: str) -> dict[str, Any]:
        """[rows, tokens, width] -> the same, and the mean of squares over the whole batch"""
        query, key, value = self.mix(self.norm(hidden)).chunk(3, -1)
        mask = torch.ones(hidden.shape[1], hidden.shape[1], device="cuda", dtype=torch.bool).tril()
        hidden = hidden + self.dropout(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
        hidden = hidden + self.dropout(self.down(self.activation(self.up(hidden))))
        return {"hidden": hidden, "square": hidden.square().mean(), "note": note}


class OwnTransformer(nn.Module):
    """A transformer whose blocks are called by name and add a mean over the batch to the loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(OwnBlock(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, tokens] of each -> loss, [rows, tokens, vocabulary]"""
        hidden, squares = self.embedding(input_ids), []
        for block in self.blocks:
            result = block(hidden=hidden, note="a word")
            assert result["note"] == "a word"
            hidden = result["hidden"]
            squares.append(result["square"])
        logits = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + torch.stack(squares).sum(), logits


def make_model(name: str) -> nn.Module:
    """Returns a fresh model with the same weights at every call; names that end in "dropout" drop."""
    torch.manual_seed(1)
    if name.startswith("own"):
        return OwnTransformer(0.1 if name.endswith("dropout") else 0.0)
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if name == "gpt2 with dropout":
        sizes = {"n_layer": 3, "n_head": 2, "n_embd": WIDTH, "n_positions": 32, "vocab_size": VOCABULARY}
        return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=1, eos_token_id=2))
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=VOCABULARY,
            max_position_embeddings=32,
            use_cache=False,
        )
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of any of these models."""
    if isinstance(model, OwnTransformer):
        return list(model.blocks)
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


def gradients(rank: int, world: int, name: str, plan: str) -> Any:
    """Returns mode, losses and gradients of two forwards before their backwards, and how often each talked."""
    runner = Runner(make_model(name).train(), Plan.parse(plan))
    batches = [make_batch("llama", step, ROWS) for step in range(2)]
    runner.call(batches[0], grad=False)  # runs the split check, so that only the calls below are counted
    runner.verdict = None
    reduced = dist.all_reduce
    talks = []
    with mock.patch("torch.distributed.all_reduce", side_effect=lambda *a, **k: talks.append(1) or reduced(*a, **k)):
        forwards = [runner.call(batch) for batch in batches]
        before = len(talks)
        for forward in forwards:
            forward.backward(runner.loss_gradient(forward))
    losses = [runner.value(forward).item() for forward in forwards]
    return runner.mode, losses, runner.gradients(), len(talks) - before


def without_dropout(rank: int, world: int, recompute: str) -> dict[str, Tensor]:
    """Returns gradients of a forward whose dropout was switched off from outside, and whose backward ran outside."""
    model = make_model("own with dropout").train()
    apply_recompute(blocks_of(model), recompute)
    with OwnDevice(CPU), NoDropout():
        loss, _ = model(**make_batch("llama", 0))
    loss.backward()
    return {key: param.grad for key, param in model.named_parameters()}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of what was computed inside and is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def count(self) -> int:
        """Returns the bytes that are still held by somebody."""
        return sum(num_bytes for reference, num_bytes in self._made.values() if not reference.expired())


def live_bytes(name: str, recompute: str | int) -> int:
    """Returns the bytes that a forward leaves for its backward, in this process."""
    model = make_model(name).train()
    apply_recompute(blocks_of(model), recompute)
    with OwnDevice(CPU), LiveBytes() as live:
        loss = model(**make_batch("llama", 0, rows=8))[0]
    count = live.count()
    loss.backward()
    return count
