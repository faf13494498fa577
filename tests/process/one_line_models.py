"""Models and batches for the tests of the one line; small, without dropout, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 96


class OwnTransformer(nn.Module):
    """A user's own model: tied embedding and head, a buffer, (logits, loss) out."""

    def __init__(self, hidden: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids_BT: Tensor, targets_BT: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden_BTH = self.embedding(ids_BT) * self.scale
        for block in self.blocks:
            hidden_BTH = hidden_BTH + block(hidden_BTH)
        logits_BTV = self.head(hidden_BTH)
        if targets_BT is None:
            return logits_BTV, None
        return logits_BTV, F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-100)


@dataclass
class Bag:
    """A user's own container for results."""

    logits: Tensor
    loss: Tensor


class Flattened(nn.Module):
    """Gives logits of shape (batch x positions, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnTransformer()

    def forward(self, ids_BT: Tensor) -> Tensor:
        logits_BTV, _ = self.inner(ids_BT)
        return logits_BTV.flatten(0, 1)


class InABag(nn.Module):
    """Gives its results in a dataclass of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnTransformer()

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Bag:
        return Bag(*self.inner(ids_BT, targets_BT))


class OneRowAfterAnother(nn.Module):
    """Goes through the rows in Python, each with what came of the one before: the batch is not split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x_BF: Tensor, labels_B: Tensor) -> Tensor:
        hidden_H, rows = torch.zeros(16, device=x_BF.device), []
        for row_F in x_BF:
            hidden_H = torch.tanh(self.first(row_F) + hidden_H)
            rows.append(hidden_H)
        return F.cross_entropy(self.last(torch.stack(rows)), labels_B)


def tiny_llama(layers: int = 2) -> nn.Module:
    """A Llama with grouped-query attention and tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def tiny_gpt2(dropout: float = 0.0) -> nn.Module:
    """A GPT-2 with learned positions and Conv1D layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def ragged_batches(count: int, rows: int, length: int = 12, seed: int = 7) -> list[dict[str, Tensor]]:
    """`count` batches of ids, mask and labels (B, T); every row is padded differently, one is nearly empty."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(count):
        ids_BT = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
        mask_BT = torch.ones_like(ids_BT)
        for row in range(rows):
            mask_BT[row, length - (row * 3 + step) % (length - 2) :] = 0
        labels_BT = ids_BT.clone()
        labels_BT[mask_BT == 0] = -100
        batches.append({"input_ids": ids_BT, "attention_mask": mask_BT, "labels": labels_BT})
    return batches
