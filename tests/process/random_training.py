"""Programs that train one of a few small models, and draw which, with which optimizer, and what they change.

No bias comes before batch normalisation, and epsilons are large: gradients of nothing but rounding would be scaled up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES, TOKENS = 16, 3, 20
STEPS = 5
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


class Program:
    """One program.

    Args:
        seed: What it draws everything from.
        device: Where the model is.

    Attributes:
        changed: The names of what was changed, in order.
        numbers: What it has read.
    """

    def __init__(self, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        SETTINGS["gain"] = 1.0
        self.draw, self.device = random.Random(seed), device
        self.model: Any = self.draw.choice(MODELS)().to(device)
        self.has_tied_head = isinstance(self.model, Decoder)
        self.kind, self.rows, self.accumulated = self.draw.choice(OPTIMIZERS), 8, 1
        self.average: Any = None
        self.kept: dict[str, Tensor] | None = None
        self.handles: list[Any] = []
        self.penalty: Callable[[], Tensor] | None = None
        self.after_backward: list[Callable[[], Any]] = []
        self.changed: list[str] = [type(self.model).__name__]
        self.numbers: list[float] = []
        self.new_optimizer()

    def new_optimizer(self) -> None:
        self.optimizer = self.kind([one for one in self.model.parameters() if one.requires_grad])

    def batch(self) -> tuple[Tensor, Tensor]:
        if self.has_tied_head:
            tokens = torch.randint(TOKENS, (self.rows, 8))
            return tokens[:, :-1].to(self.device), tokens[:, 1:].to(self.device)
        shape = {Residual: (6,), Convolutional: (3, 8, 8), Recurrent: (9,)}[type(self.model)]
        is_text = isinstance(self.model, Recurrent)
        x = torch.randint(TOKENS, (self.rows, *shape)) if is_text else torch.randn(self.rows, *shape)
        return x.to(self.device), torch.randint(CLASSES, (self.rows,)).to(self.device)

    def loss(self) -> Tensor:
        x, targets = self.batch()
        if self.has_tied_head and self.draw.random() < 0.5:
            return self.model(x, targets)  # type: ignore[no-any-return]
        return F.cross_entropy(self.model(x).flatten(0, -2), targets.flatten())

    def read(self, value: Tensor) -> None:
        self.numbers.append(float(value.detach()))

    def run(self, changes: Mapping[str, Callable[[Program], Any]]) -> list[float]:
        """Trains, draws what it changes before each step, and returns what it has read."""
        for step in range(STEPS):
            for _ in range(self.draw.choice([0, 1, 1, 2, 3]) if step else 0):
                name = self.draw.choice(list(changes))
                self.changed.append(name)
                changes[name](self)
            self.optimizer.zero_grad()
            for _ in range(self.accumulated):
                loss = self.loss() if self.penalty is None else self.loss() + self.penalty()
                if loss.requires_grad:
                    (loss / self.accumulated).backward()
                self.read(loss)
            for change in self.after_backward:
                change()
            if self.draw.random() < 0.5:
                self.after_backward = []
            self.optimizer.step()
        self.read(sum(one.detach().double().square().sum() for one in self.model.parameters()))  # type: ignore[arg-type]
        for buffer in self.model.buffers():
            self.read(buffer.double().nan_to_num(neginf=-1.0).abs().sum())
        return self.numbers

    # What changes draw: a layer, a parameter.

    def linear(self) -> nn.Linear:
        return self.draw.choice([one for one in self.model.modules() if type(one) is nn.Linear])

    def parameter(self) -> nn.Parameter:
        return self.draw.choice(list(self.model.parameters()))  # type: ignore[no-any-return]

    def parts(self, kind: type[nn.Module]) -> list[Any]:
        return [one for one in self.model.modules() if isinstance(one, kind)]

    def gradients(self) -> list[Tensor]:
        return [one.grad for one in self.model.parameters() if one.grad is not None]
