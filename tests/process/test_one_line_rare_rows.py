"""Rows that meet by what a few of them do not show, or in the first call alone: split, with one device's numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rotating import rotating_from
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver, MovingAverageMinMaxObserver
from torch.nn.utils.rnn import pack_sequence


@pytest.fixture(params=rotating_from(1, ["replicate=2", "shard=2"]), autouse=True)
def session(request, accelerator):
    return accelerator(request.param, strict=True)  # a call that every device computes whole is an error


class Classifier(nn.Module):
    """Two layers, with dropout; a loss of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(8, 16), nn.Linear(16, 4), nn.Dropout(0.1)

    def losses(self, x_BF: Tensor, y_B: Tensor) -> tuple[Tensor, Tensor]:
        logits_BC = self.outer(self.drop(F.relu(self.inner(x_BF))))
        return logits_BC, F.cross_entropy(logits_BC, y_B, reduction="none")


class RareTerm(Classifier):
    """Divides by the number of rows that count: in the first batches few do, and none that is tried."""

    def forward(self, x_BF: Tensor, y_B: Tensor) -> Tensor:
        logits_BC, losses_B = self.losses(x_BF, y_B)
        counts_B = x_BF[:, 0] > 0.5
        return losses_B.mean() + (logits_BC.square().sum(1) * counts_B).sum() / counts_B.sum().clamp(min=1)


class ReadCount(Classifier):
    """Divides by a number of Python, of which a row that does not count shows nothing."""

    def forward(self, x_BF: Tensor, y_B: Tensor) -> Tensor:
        _, losses_B = self.losses(x_BF, y_B)
        counts_B = x_BF[:, 0] > 0
        number = counts_B.sum().item()
        return (losses_B * counts_B).sum() / number if number else losses_B.sum() * 0


class Weighted(Classifier):
    """As `RareTerm`, with weights among the arguments of which most are zero."""

    def forward(self, x_BF: Tensor, y_B: Tensor) -> Tensor:
        logits_BC, losses_B = self.losses(x_BF, y_B)
        weights_B = F.relu(x_BF[:, 1] - 0.5)
        return losses_B.mean() + (logits_BC.square().sum(1) * weights_B).sum() / weights_B.sum().clamp(min=1e-3)


class Observed(Classifier):
    """Scales by running extremes of its own, and quantizes by those of PyTorch's observers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(0.0))
        quantized = {"quant_min": 0, "quant_max": 255}
        self.first = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, **quantized)()
        self.second = FakeQuantize.with_args(observer=MinMaxObserver, **quantized)()

    def forward(self, x_BF: Tensor, y_B: Tensor) -> Tensor:
        hidden_BH = self.first(self.inner(x_BF))
        with torch.no_grad():
            self.low.lerp_(hidden_BH.min(), 0.1)
            self.high.lerp_(hidden_BH.max(), 0.1)
        return F.cross_entropy(self.outer(self.second(self.drop(hidden_BH / (self.high - self.low)))), y_B)


class SetUp(Classifier):
    """Finds its scales in the rows of the first call (ActNorm)."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.scale = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.ones(16))
        self.register_buffer("is_set_up", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x_BF: Tensor, y_B: Tensor) -> Tensor:
        hidden_BH = self.inner(x_BF)
        if self.training and self.is_set_up.item() == 0:
            self.place.data.copy_(-hidden_BH.detach().mean(0))
            self.scale.data.copy_(1 / (hidden_BH.detach().std(0) + 1e-6))
            self.is_set_up.fill_(1)
        return F.cross_entropy(self.outer(self.drop(self.scale * (hidden_BH + self.place))), y_B)


class Codebook(Classifier):
    """Codes that k-means finds in the first call and that follow averages; those of few rows are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(5, 16))
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("is_set_up", torch.tensor(False))

    @torch.no_grad()
    def follow(self, hidden_BH: Tensor) -> None:
        if not self.is_set_up:
            self.codes.copy_(hidden_BH[torch.randperm(len(hidden_BH), device=hidden_BH.device)[: len(self.codes)]])
            self.is_set_up.fill_(True)
        chosen_BK = F.one_hot(torch.cdist(hidden_BH, self.codes).argmin(1), len(self.codes)).type_as(hidden_BH)
        self.counts.lerp_(chosen_BK.sum(0), 0.3)
        self.codes.lerp_(chosen_BK.T @ hidden_BH / chosen_BK.sum(0).clamp(min=1).unsqueeze(1), 0.1)
        is_unused_K = self.counts < 0.6
        if torch.any(is_unused_K):
            chosen_K = torch.randint(0, len(hidden_BH), (len(self.codes),), device=hidden_BH.device)
            self.codes.copy_(torch.where(is_unused_K[:, None], hidden_BH[chosen_K], self.codes))
            self.counts.masked_fill_(is_unused_K, 1.0)

    def forward(self, x_BF: Tensor, y_B: Tensor) -> Tensor:
        hidden_BH = self.inner(x_BF)
        if self.training:
            self.follow(hidden_BH.detach())
        nearest_BH = self.codes[torch.cdist(hidden_BH, self.codes).argmin(1)]
        loss = F.mse_loss(hidden_BH, nearest_BH)
        return loss + F.cross_entropy(self.outer(self.drop(hidden_BH + (nearest_BH - hidden_BH).detach())), y_B)


@pytest.mark.parametrize("kind", rotating_from(1, [RareTerm, ReadCount, Weighted, Observed, Codebook]))
def test_rows_that_a_trial_does_not_have_count_as_on_one_device(kind):
    assert_trains_alike(kind)


@pytest.mark.parametrize("session", ["replicate=2"], indirect=True)
def test_a_model_that_the_first_call_sets_up_is_split_from_the_second_on():
    assert_trains_alike(SetUp)


def assert_trains_alike(kind: type[nn.Module]) -> None:
    """Compares losses, buffers, evaluation and gradients of a few steps with one device's."""

    def script(device):
        model = kind().to(device)
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
        generator = torch.Generator().manual_seed(1)
        for rows in (6, 6, 7, 5, 6):
            x = torch.randn(rows, 8, generator=generator).to(device)
            y = torch.randint(0, 4, (rows,), generator=generator).to(device)
            optimizer.zero_grad()
            loss = model.train()(x, y)
            loss.backward()
            optimizer.step()
            trace += [loss.detach(), *(buffer.float() for buffer in model.buffers())]
            with torch.no_grad():
                trace.append(model.eval()(x, y))
        return trace, [parameter.grad for parameter in model.parameters()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class Negatives(nn.Module):
    """Compares each step with others of its row, by their numbers in the batch, and quantizes by what it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scores = nn.Linear(8, 6), nn.Linear(6, 6)
        self.codes = nn.Parameter(torch.randn(6, 6))

    def forward(self, x_BTF: Tensor, others_BTN: Tensor) -> Tensor:
        hidden_BTH = self.encoder(x_BTF)
        codes_NC = F.gumbel_softmax(self.scores(hidden_BTH).view(-1, 6), tau=2.0, hard=True)
        features_BTH = (codes_NC @ self.codes).view(hidden_BTH.shape)
        others_BTNH = features_BTH.view(-1, 6)[others_BTN.view(-1)].view(*others_BTN.shape, 6)
        candidates_BTMH = torch.cat([features_BTH.unsqueeze(2), others_BTNH], 2)
        similar_BTM = torch.cosine_similarity(hidden_BTH.unsqueeze(2), candidates_BTMH, dim=-1) / 0.1
        used_C = self.scores(hidden_BTH).softmax(-1).mean((0, 1))
        diversity = torch.exp(-(used_C * used_C.log()).sum())
        target_N = similar_BTM.new_zeros(similar_BTM.shape[:2], dtype=torch.long).flatten()
        return F.cross_entropy(similar_BTM.flatten(0, 1), target_N, reduction="sum") - 0.1 * diversity


def test_entries_that_are_numbered_through_the_batch_are_those_of_a_workers_rows():
    def script(device):
        model = Negatives().to(device)
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.01), []
        generator = torch.Generator().manual_seed(1)
        for rows, length in ((6, 7), (5, 7), (7, 9)):
            x = torch.randn(rows, length, 8, generator=generator)
            others = torch.randint(0, length, (rows, length, 3), generator=generator)
            others += length * torch.arange(rows).view(-1, 1, 1)
            loss = model(x.to(device), others.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.detach())
        return trace, [parameter.grad for parameter in model.parameters()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


def test_a_packed_sequence_that_a_model_returns_has_the_rows_of_all_workers():
    def script(device):
        model, trace = nn.GRU(8, 6).to(device), []
        for lengths in ((4, 2, 5, 3, 1), (2, 6, 3)):
            torch.manual_seed(0)
            packed = pack_sequence([torch.randn(length, 8) for length in lengths], enforce_sorted=False).to(device)
            outputs, states = model(packed)
            (outputs.data.square().mean() + states.abs().mean()).backward()
            trace += [outputs.data.detach(), states.detach()]
        return trace, [parameter.grad for parameter in model.parameters()]

    assert_same(*on_both(script))


class Forces(nn.Module):
    """Energies and forces: in evaluation, nothing can go back through these."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, places_BNX: Tensor) -> tuple[Tensor, Tensor]:
        places_BNX = places_BNX.requires_grad_(True)
        squared_BNN = (places_BNX[:, :, None] - places_BNX[:, None]).square().sum(-1)
        energies_B = self.net((squared_BNN + 1e-3).sqrt().unsqueeze(-1)).sum((1, 2, 3))
        (slopes_BNX,) = torch.autograd.grad(energies_B.sum(), places_BNX, create_graph=self.training)
        return energies_B, -slopes_BNX


def test_forces_in_evaluation_are_split_with_gradients_on():
    def script(device):
        torch.manual_seed(0)
        model = Forces().to(device).eval()
        energies, forces = model(torch.randn(5, 4, 3).to(device))
        return energies.detach(), forces.detach()

    assert_same(*on_both(script))
