"""Small models and batches for the parallelizer's tests, and the one-device run they are compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, LENGTH, VOCABULARY = 5, 12, 61
ADAMW = {"lr": 3e-3, "eps": 1e-6}
"""Steps at which one process agrees with itself to 4e-5 when the rows of its batches change places. The gradient of an
attention's key bias is zero but for rounding: with the usual eps of 1e-8 AdamW takes steps along that noise (3e-2)."""


class Block(nn.Module):
    """One residual block of `Classifier`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, width] -> [rows, width]"""
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Classifier(nn.Module):
    """A model of nobody's library: blocks, a parameter without dims, rows that can be ignored, two outputs."""

    def __init__(self, width: int = 15, classes: int = 7) -> None:
        super().__init__()
        self.inlet = nn.Linear(9, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, classes)
        self.idle = nn.Linear(width, 3)

    def features(self, x: Tensor) -> Tensor:
        """[rows, 9] -> [rows, width]"""
        hidden = self.inlet(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, 9], [rows] -> loss, [rows, classes]"""
        logits = self.head(self.features(x)) * self.scale
        return F.cross_entropy(logits, labels) + 0.1 * logits.square().mean(), logits


class Branching(Classifier):
    """Looks at a value that depends on parameters, which meta tensors do not have."""

    def features(self, x: Tensor) -> Tensor:
        """[rows, 9] -> [rows, width]"""
        hidden = super().features(x)
        return hidden if bool(hidden.isfinite().all()) else hidden.nan_to_num()


class Dividing(Classifier):
    """Divides a sum of losses by a count of its own, and gives the losses too."""

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, 9], [rows] -> loss, [rows]"""
        mask = labels != -100
        losses = F.cross_entropy(self.head(self.features(x)), labels, reduction="none")
        return losses.sum() / mask.sum().clamp(min=1), losses


class RoutedBlock(Block):
    """A block that sends each row to one of two experts by a value of its own, and none to a third."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        """[rows, width], [rows] -> [rows, width]"""
        hidden = super().forward(hidden)
        added = torch.zeros_like(hidden)
        for expert, layer in enumerate(self.experts):
            rows = (places == expert).nonzero()[:, 0]
            if len(rows):
                added = added.index_add(0, rows, layer(hidden[rows]))
        return hidden + added


class Routed(Classifier):
    """Has experts; which rows come to them depends on the rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RoutedBlock(15) for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        """[rows, 9] -> [rows, width]"""
        hidden = self.inlet(x)
        for block in self.blocks:
            hidden = block(hidden, x[:, 0].lt(0).long())
        return hidden


class Skipping(Classifier):
    """Leaves the second block out where no row has a value for it: it comes to the block in the first rows alone."""

    def features(self, x: Tensor) -> Tensor:
        """[rows, 9] -> [rows, width]"""
        hidden = self.blocks[0](self.inlet(x))
        chosen = x[:, :1] < 0
        if bool(chosen.any()):
            hidden = torch.where(chosen, self.blocks[1](hidden), hidden)
        return self.blocks[2](hidden)


OWN_MODELS = {
    "classifier": Classifier,
    "branching": Branching,
    "dividing": Dividing,
    "routed": Routed,
    "skipping": Skipping,
}


def make_model(name: str) -> nn.Module:
    """Returns a fresh model with the same weights at every call."""
    torch.manual_seed(1)
    if name in OWN_MODELS:
        return OWN_MODELS[name]()
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if name == "gpt2":  # its output weights are tied to the embedding
        sizes = GPT2Config(
            n_layer=2, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        return GPT2LMHeadModel(sizes)
    sizes = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCABULARY, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(sizes)


def make_batch(name: str, step: int, rows: int = ROWS) -> dict[str, Tensor]:
    """Returns the batch of a step: rows of unequal length, the last one without any target."""
    random = torch.Generator().manual_seed(100 + step)
    if name in OWN_MODELS:
        labels = torch.randint(0, 7, (rows,), generator=random)
        labels[-1] = -100
        return {"x": torch.randn(rows, 9, generator=random), "labels": labels}
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=random)
    lengths = torch.randint(3, LENGTH + 1, (rows, 1), generator=random)
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[-1] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_of(result: Any) -> Tensor:
    """Returns the loss in the result of any of these models."""
    return result[0] if isinstance(result, tuple) else result.loss


def train_alone(name: str, steps: int, rows: int = ROWS) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses and final weights of plain PyTorch in this process."""
    model = make_model(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for step in range(steps):
        loss = loss_of(model(**make_batch(name, step, rows)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: value.detach() for key, value in model.named_parameters()}
