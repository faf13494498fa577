"""What takes of all rows of a batch more than rows that meet: statistics of its parts, and places in experts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both, train_step
from torch import Tensor, nn

pytestmark = pytest.mark.rotating

WHOLE = "Every device computes the whole batch"


@pytest.fixture(params=["replicate=2", "shard=2"])
def session(request, accelerator):
    return accelerator(request.param, strict=True)  # a call that every device computes whole is an error


class Ghost(nn.Module):
    """Normalises parts of the batch, each by itself."""

    def __init__(self, features: int, part: int, momentum: float) -> None:
        super().__init__()
        self.bn, self.part = nn.BatchNorm1d(features, momentum=momentum), part

    def forward(self, x_BF: Tensor) -> Tensor:
        return torch.cat([self.bn(part) for part in x_BF.chunk(math.ceil(len(x_BF) / self.part), 0)])


class Tabular(nn.Module):
    """Normalises the features of all rows, and what it makes of them by parts; returns a mean beside its scores."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.all, self.first, self.second = nn.BatchNorm1d(8), nn.Linear(8, 16), nn.Linear(8, 4)
        self.ghost, self.other = Ghost(16, part, 0.02), Ghost(8, part, 0.3)

    def forward(self, x_BF: Tensor) -> tuple[Tensor, Tensor]:
        a_BF, b_BF = self.ghost(self.first(self.all(x_BF))).chunk(2, 1)
        mask_BF = self.other(a_BF * b_BF.sigmoid()).softmax(-1)
        return self.second(mask_BF), (mask_BF * torch.log(mask_BF + 1e-6)).sum(1).mean()


def tabular_script(rows: tuple[int, ...], part: int):
    def script(device):
        torch.manual_seed(0)
        model = Tabular(part).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for number in rows:
            scores, entropy = model(torch.randn(number, 8).to(device))
            loss = F.cross_entropy(scores, torch.randint(0, 4, (number,)).to(device)) - 1e-2 * entropy
            train_step(trace, model, optimizer, loss)
        return [*trace, *(value.float() for value in model.state_dict().values())]

    return script


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ((128, 128, 64), 32),  # of a few rows there is one part
        ((32, 32, 48, 16), 4),
        ((32, 32, 24), 64),  # one part
    ],
)
def test_parts_of_the_batch_are_normalised_by_the_workers_that_have_them(session, rows, part):
    assert_same(*on_both(tabular_script(rows, part)), rtol=1e-4, atol=1e-5)


def test_parts_that_no_worker_has_whole_are_those_of_one_device(accelerator, capsys):
    accelerator("replicate=2")
    assert_same(*on_both(tabular_script((96, 96, 128), 32)), rtol=1e-4, atol=1e-5)
    assert WHOLE in capsys.readouterr().out


class Experts(nn.Module):
    """Experts that take so many words of the batch, in its order; what comes later goes past them (GShard)."""

    def __init__(self, factor: float, by_index: bool) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))
        self.factor, self.by_index = factor, by_index

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x_ND = x_BTD.reshape(-1, 16)
        gates_NE = self.router(x_ND * 3).softmax(-1)
        best_N, chosen_N = gates_NE.max(-1)
        mask_NE = F.one_hot(chosen_N, 4)
        balance = (gates_NE.mean(0) * mask_NE.float().mean(0)).sum() * 4
        capacity = max(4, int(self.factor * x_ND.shape[0] / 4))
        place_NE = torch.cumsum(mask_NE, 0) - 1
        mask_NE = mask_NE * (place_NE < capacity)
        if self.by_index:
            result_ND = torch.zeros_like(x_ND)
            for number, expert in enumerate(self.experts):
                row_M = mask_NE[:, number].nonzero().squeeze(1)
                result_ND = result_ND.index_add(0, row_M, expert(x_ND[row_M]) * best_N[row_M, None])
        else:
            place_NC = F.one_hot((place_NE * mask_NE).sum(1), capacity) * mask_NE.sum(1, keepdim=True)
            sent_NEC = mask_NE[:, :, None] * place_NC[:, None].to(x_ND.dtype)
            given_ECD = torch.einsum("nec,nd->ecd", sent_NEC, x_ND)
            made_ECD = torch.stack([expert(given_CD) for expert, given_CD in zip(self.experts, given_ECD)])
            result_ND = torch.einsum("nec,ecd->nd", sent_NEC, made_ECD) * best_N[:, None]
        return x_BTD + result_ND.view_as(x_BTD), balance


class Language(nn.Module):
    def __init__(self, factor: float, by_index: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(Experts(factor, by_index) for _ in range(2))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD, extra = self.mix(self.embed(tokens_BT)), 0.0
        for layer in self.layers:
            x_BTD, balance = layer(x_BTD)
            extra = extra + balance
        return F.cross_entropy(self.head(x_BTD).flatten(0, 1), targets_BT.flatten()) + 0.01 * extra


@pytest.mark.parametrize("factor", [0.6, 1.1])
@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_words_beyond_the_capacity_of_an_expert_are_those_of_one_device(accelerator, plan, by_index, factor):
    accelerator(plan, strict=True)

    def script(device):
        torch.manual_seed(0)
        model = Language(factor, by_index).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for rows in (24, 24, 11):
            tokens = torch.randint(0, 40, (rows, 9)).to(device)
            train_step(trace, model, optimizer, model(tokens[:, :-1], tokens[:, 1:]))
        return [*trace, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)


class Renormalised(nn.Module):
    """Embeds words, and bags of labels, in vectors whose norms are kept small."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(200, 8, max_norm=1.0), nn.EmbeddingBag(60, 8, max_norm=0.5, mode="sum")
        self.head = nn.Linear(8, 3)

    def forward(self, words_BT: Tensor, labels_BK: Tensor) -> Tensor:
        return self.head(self.words(words_BT).mean(1) + self.bag(labels_BK))


def test_embeddings_are_renormalised_by_what_all_workers_look_up(accelerator):
    accelerator("replicate=2", strict=True)

    def script(device):
        torch.manual_seed(0)
        model = Renormalised().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        trace = []
        for rows in (8, 8, 5):
            words, labels = torch.randint(0, 200, (rows, 6)).to(device), torch.randint(0, 60, (rows, 3)).to(device)
            loss = F.cross_entropy(model(words, labels), torch.randint(0, 3, (rows,)).to(device))
            train_step(trace, model, optimizer, loss)
        return [*trace, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)


class Dropping(nn.Module):
    """Experts that take the first words that go to them; the others stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x_BTF: Tensor) -> Tensor:
        x_ND = self.embed(x_BTF).flatten(0, 1)
        best_N, chosen_N = self.router(x_ND).softmax(-1).max(-1)
        capacity, made_ND = int(2.0 * len(x_ND) / 4), x_ND * 1.0
        for number, expert in enumerate(self.experts):
            row_M = torch.eq(chosen_N, number).nonzero(as_tuple=True)[0]
            if len(row_M) > capacity:
                row_M = row_M[:capacity]
            made_ND[row_M] = expert(x_ND[row_M])
        return self.head((made_ND * best_N[:, None]).view(*x_BTF.shape[:2], 16)).mean(1)


def test_words_that_are_dropped_later_in_the_training_are_those_of_one_device(accelerator, capfd):
    accelerator("replicate=2")

    def script(device):
        torch.manual_seed(0)
        model = Dropping().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    model.router.bias += torch.tensor([9.0, 0, 0, 0]).to(device)  # nearly all go to one expert
            x, y = torch.randn(16, 6, 8).to(device), torch.randint(0, 3, (16,)).to(device)
            train_step(trace, model, optimizer, F.cross_entropy(model(x), y))
        return [*trace, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)
    assert WHOLE in "".join(capfd.readouterr())
