"""Small models and optimizers of which programs drawn at random train one.

No bias comes before batch normalisation, and epsilons are large: gradients of nothing but rounding would be scaled up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES, TOKENS = 16, 3, 20
SETTINGS = {"gain": 1.0}
"""A global variable that all forwards read."""


class Scale(nn.Module):
    """Has a parameter, a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(WIDTH)), 1.0
        self.register_buffer("offset", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.factor + self.offset


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale, self.activation = nn.LayerNorm(WIDTH), Scale(), nn.GELU()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale(self.second(self.activation(self.first(self.norm(x)))))


class Residual(nn.Module):
    """Blocks of which each has a weight in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks, self.weights, self.drop = nn.ModuleList(Block() for _ in range(3)), [1.0] * 3, nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x) * SETTINGS["gain"]
        for weight, block in zip(self.weights, self.blocks):
            x = block(x) * weight
        return self.head(self.drop(x))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Conv2d(size, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for size in (3, 8, 8)]
        self.body, self.drop = nn.Sequential(*(layer for each in layers for layer in each)), nn.Dropout(0.0)
        self.head, self.weights = nn.Linear(8, CLASSES), [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x).mean((2, 3)) * self.weights[0])) * SETTINGS["gain"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(TOKENS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.scale, self.head, self.weights = Scale(), nn.Linear(WIDTH, CLASSES), [1.0]
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.rnn(self.embedding(x))
        return self.head(self.drop(self.scale(hidden[-1]))) * self.weights[0] * SETTINGS["gain"]


class Decoder(nn.Module):
    """A causal mask with infinities, an embedding that is the head's weight, the loss in the forward."""

    def __init__(self) -> None:
        super().__init__()
        layer = lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)  # noqa: E731
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.blocks, self.norm, self.weights = nn.ModuleList(layer() for _ in range(2)), nn.LayerNorm(WIDTH), [1.0]
        self.head.weight, self.drop = self.embedding.weight, nn.Dropout(0.0)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(7))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        hidden = self.drop(self.embedding(x)) * self.weights[0]
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask)
        logits = self.head(self.norm(hidden)) * SETTINGS["gain"]
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS = (Residual, Convolutional, Recurrent, Decoder)
OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda params: torch.optim.SGD(params, 0.1),
    lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True),
    lambda params: torch.optim.AdamW(params, 0.01, eps=1e-4),
    lambda params: torch.optim.Adam(params, 0.01, eps=1e-4, amsgrad=True),
    lambda params: torch.optim.RMSprop(params, 0.005, eps=1e-3),
    lambda params: torch.optim.Adagrad(params, 0.05, eps=1e-3),
)
