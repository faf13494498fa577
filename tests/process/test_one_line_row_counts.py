"""Results that tell how many rows there are, as distributions do, and masks of as many steps as the batch has rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rotating import rotating_from
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

ROWS = 8


@pytest.fixture(params=rotating_from(1, ["replicate=2", "shard=2", "replicate=3"]), autouse=True)
def session(request, accelerator):
    return accelerator(request.param, strict=True)  # a call that every device computes whole is an error


def stepped(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Takes a step; returns the loss without its history."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


class Actor(nn.Module):
    """Returns a distribution for each row, of actions that are numbers or choices, and a value."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.actions, self.value = nn.Linear(5, 16), nn.Linear(16, 3), nn.Linear(16, 1)
        self.scale, self.kind = nn.Parameter(torch.zeros(3)), kind

    def forward(self, x: Tensor):
        hidden = self.body(x).tanh()
        actions = self.actions(hidden)
        if self.kind == "choices":
            return Categorical(logits=actions), self.value(hidden).squeeze(-1)
        normal = Normal(actions, self.scale.exp())
        return (Independent(normal, 1) if self.kind == "vectors" else normal), self.value(hidden).squeeze(-1)


@pytest.mark.parametrize("kind", rotating_from(1, ["choices", "numbers", "vectors"]))
def test_distributions_are_those_of_all_rows(kind):
    torch.manual_seed(0)
    steps = [(torch.randn(ROWS, 5), torch.randn(ROWS)) for _ in range(3)]
    actions = torch.randint(0, 3, (ROWS,)) if kind == "choices" else torch.randn(ROWS, 3)

    def train(device: str) -> list[Tensor]:
        model = Actor(kind).to(device)
        optimizer, trace = torch.optim.Adam(model.parameters(), lr=1e-2), []
        for x, gains in steps:
            found, value = model(x.to(device))
            assert found.batch_shape[0] == ROWS and len(value) == ROWS
            chosen, gains = found.log_prob(actions.to(device)), gains.to(device)
            chosen = chosen.sum(-1) if kind == "numbers" else chosen
            loss = -(chosen * gains).mean() + F.mse_loss(value, gains) - 0.01 * found.entropy().mean()
            trace.append(stepped(optimizer, loss))
        return trace + [parameter.detach() for parameter in model.parameters()]

    assert_same(*on_both(train))


class Counting(nn.Module):
    """Returns the number of its rows, and of what a mask keeps, beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor):
        return self.layer(x * mask), len(x), int(mask.sum())


def test_whole_numbers_are_sums_over_all_rows():
    torch.manual_seed(0)
    x, mask = torch.randn(ROWS, 6), torch.rand(ROWS, 6) < 0.5

    def train(device: str) -> list[Tensor]:
        model = Counting().to(device)
        logits, rows, kept = model(x.to(device), mask.to(device))
        assert (rows, kept) == (ROWS, int(mask.sum()))
        loss = logits.square().sum() / kept
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    assert_same(*on_both(train))


class Reader(nn.Module):
    """An encoder with a mask of its steps."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.words, self.encoder, self.head = nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 20)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(words), mask=mask))


def test_a_mask_of_as_many_steps_as_there_are_rows_stays_whole():
    torch.manual_seed(0)
    words, wanted = torch.randint(0, 20, (2, 3, ROWS, ROWS))
    mask = nn.Transformer.generate_square_subsequent_mask(ROWS)

    def train(device: str) -> list[Tensor]:
        model = Reader().to(device)
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.1), []
        for given, next_words in zip(words, wanted):
            scores = model(given.to(device), mask.to(device))
            loss = F.cross_entropy(scores.flatten(0, 1), next_words.flatten().to(device))
            trace.append(stepped(optimizer, loss))
        return trace + [parameter.detach() for parameter in model.parameters()]

    assert_same(*on_both(train))


class Queue(nn.Module):
    """Compares its rows with those of earlier batches, which it keeps in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(6, 4), nn.Linear(6, 4)
        self.register_buffer("kept", F.normalize(torch.randn(4, 3 * ROWS), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        queries = F.normalize(self.queries(x), dim=1)
        with torch.no_grad():
            keys = F.normalize(self.keys(other), dim=1)
        same = (queries * keys).sum(1, keepdim=True)
        scores = torch.cat([same, queries @ self.kept.clone().detach()], 1) / 0.2
        self.keep(keys)
        return scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device)

    @torch.no_grad()
    def keep(self, keys: Tensor) -> None:
        rows, place = keys.shape[0], int(self.place)
        assert self.kept.shape[1] % rows == 0
        self.kept[:, place : place + rows] = keys.T
        self.place[0] = (place + rows) % self.kept.shape[1]


def test_a_ring_of_rows_goes_on_by_the_rows_of_the_batch():
    torch.manual_seed(0)
    x, other = torch.randn(2, 5, ROWS, 6)

    def train(device: str) -> list[Tensor]:
        model = Queue().to(device)
        optimizer, trace = torch.optim.SGD(model.queries.parameters(), lr=0.5), []
        for given in zip(x, other):
            scores, wanted = model(*(one.to(device) for one in given))
            loss = F.cross_entropy(scores, wanted)
            trace.append(stepped(optimizer, loss))
        return [*trace, *(value.detach() for value in model.state_dict().values())]

    assert_same(*on_both(train))
