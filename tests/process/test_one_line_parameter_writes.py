"""Forwards that change parameters: each worker computes its rows where all workers change them alike."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn

from moreh_ap.errors import UnsupportedError

WHOLE = "Every device computes the whole batch"


class CodebookOfParameters(nn.Module):
    """The averages and the codebook are parameters, and each forward puts others in their place."""

    def __init__(self, width: int = 4, codes: int = 12, decay: float = 0.9) -> None:
        super().__init__()
        self.codes, self.decay = codes, decay
        self.codebook = nn.Embedding(codes, width)
        self.sums = nn.Parameter(torch.randn(codes, width))
        self.register_buffer("counts", torch.zeros(codes))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        flat = inputs.view(-1, inputs.shape[-1])
        weight = self.codebook.weight
        distances = flat.square().sum(1, keepdim=True) + weight.square().sum(1) - 2 * flat @ weight.t()
        chosen = distances.argmin(1).unsqueeze(1)
        encodings = torch.zeros(chosen.shape[0], self.codes, device=inputs.device)
        encodings.scatter_(1, chosen, 1)
        quantized = torch.matmul(encodings, weight).view(inputs.shape)
        if self.training:
            self.follow(encodings, flat)
        loss = F.mse_loss(quantized.detach(), inputs)
        return loss, (inputs + (quantized - inputs).detach()).permute(0, 3, 1, 2)

    def follow(self, encodings: Tensor, flat: Tensor) -> None:
        self.counts = self.counts * self.decay + (1 - self.decay) * encodings.sum(0)
        total = self.counts.sum()
        self.counts = (self.counts + 1e-5) / (total + self.codes * 1e-5) * total
        self.sums = nn.Parameter(self.sums * self.decay + (1 - self.decay) * encodings.t() @ flat)
        self.codebook.weight = nn.Parameter(self.sums / self.counts.unsqueeze(1))


class CodebookOfData(CodebookOfParameters):
    """The same with `.data`, where the codebook's parameter is a trainable one."""

    @torch.no_grad()
    def follow(self, encodings: Tensor, flat: Tensor) -> None:
        self.counts.mul_(self.decay).add_(encodings.sum(0), alpha=1 - self.decay)
        self.sums.data = self.sums.data * self.decay + (1 - self.decay) * (encodings.t() @ flat)
        self.codebook.weight.data.copy_(self.sums / (self.counts + 0.1).unsqueeze(1))


class Autoencoder(nn.Module):
    def __init__(self, codebook: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 1, 1))
        self.codebook = codebook
        self.decoder = nn.Sequential(nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 1, 3, 1, 1))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        loss, quantized = self.codebook(self.encoder(x))
        return 0.25 * loss + F.mse_loss(self.decoder(quantized), x)


class Follower(nn.Module):
    """As BYOL: an encoder whose parameters get new data in every forward follows another; the targets are centred."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 6))
        self.target = copy.deepcopy(self.online)
        self.predictor = nn.Linear(6, 6)
        self.register_buffer("centre", torch.zeros(1, 6))

    @torch.no_grad()
    def follow(self) -> None:
        for online, target in zip(self.online.parameters(), self.target.parameters()):
            target.data = target.data * 0.9 + online.data * 0.1

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.follow()
        predicted = F.normalize(self.predictor(self.online(x)), dim=-1)
        with torch.no_grad():
            found = self.target(y)
            self.centre = self.centre * 0.9 + found.mean(dim=0, keepdim=True) * 0.1
        return (2 - 2 * (predicted * F.normalize(found - self.centre, dim=-1)).sum(-1)).mean()


class Teacher(nn.Module):
    """A mean teacher whose parameters look trainable: it follows sooner at first."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Flatten(), nn.Linear(64, 6))
        self.teacher = copy.deepcopy(self.student)
        self.steps = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        decay = min(1 - 1 / (self.steps + 1), 0.99)
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters()):
                own.data.mul_(decay).add_(other.data, alpha=1 - decay)
            target = self.teacher(y).softmax(-1)
        return F.kl_div(self.student(x).log_softmax(-1), target, reduction="batchmean")


class Prototypes(nn.Module):
    """As SwAV: prototypes are normalised in place before they are used, and trained."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.prototypes = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            weight = F.normalize(self.prototypes.weight.data.clone(), dim=1)
            self.prototypes.weight.copy_(weight)
        rows = x.size(0)
        scores = self.prototypes(F.normalize(self.encoder(torch.cat([x, y])), dim=1))
        with torch.no_grad():
            shares = torch.exp(scores[:rows] / 0.5).t()
            shares /= shares.sum()
            for _ in range(2):
                shares /= shares.sum(dim=1, keepdim=True)
                shares /= shares.sum(dim=0, keepdim=True)
        return -torch.mean(torch.sum(shares.t() * F.log_softmax(scores[rows:] / 0.5, dim=1), dim=1))


MODELS = {
    "prototypes": Prototypes,
    "codebook of parameters": lambda: Autoencoder(CodebookOfParameters()),
    "codebook of data": lambda: Autoencoder(CodebookOfData()),
    "follower": Follower,
    "teacher": Teacher,
}


def trained(model: nn.Module, lr: float, batches: Iterable[Sequence[Tensor]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the losses of a training by SGD, and what became of the model."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for batch in batches:
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model.state_dict()


def pictures(device: str, *num_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draws two batches of pictures a step when the step begins."""
    for rows in num_rows:
        yield torch.randn(rows, 1, 8, 8).to(device), torch.randn(rows, 1, 8, 8).to(device)


@pytest.mark.rotating
@pytest.mark.parametrize("name", MODELS)
def test_changed_parameters_are_those_of_one_device_and_each_worker_computes_its_rows(name, accelerator, capsys):
    def script(device):
        return trained(MODELS[name]().to(device), 0.05, pictures(device, 8, 8, 5, 8))

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


def test_micro_batches_would_change_a_parameter_once_each(accelerator, capsys):
    def script(device):
        model, losses = Follower().to(device), []
        optimizer = torch.optim.SGD([*model.online.parameters(), *model.predictor.parameters()], lr=0.05)
        for _ in range(3):
            loss = model(torch.randn(8, 1, 8, 8).to(device), torch.randn(8, 1, 8, 8).to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, model.state_dict()

    accelerator("replicate=2,micro_batches=2")
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert "the forward changes parameter target" in capsys.readouterr().out


class Momentum(nn.Module):
    """As MoCo: an encoder that follows another by what it gets in place of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * 0.9 + q.data * 0.1
        return (self.encoder_q(x) * self.encoder_k(x)).sum(1)


def test_a_parameter_that_is_sharded_gets_no_other_memory_in_forward(accelerator):
    accelerator("shard=2")
    with pytest.raises(UnsupportedError, match=r"forward changes the parameter encoder_k\.weight itself"):
        Momentum().to("cuda")(torch.randn(8, 6).to("cuda")).sum().item()


class SkipGram(nn.Module):
    """word2vec with vectors within a norm, which a forward shortens where its rows look them up."""

    def __init__(self) -> None:
        super().__init__()
        self.centre, self.context = (nn.Embedding(30, 8, max_norm=1.0) for _ in range(2))
        self.centre.weight.data.uniform_(-0.56, 0.56)  # a part of the vectors is longer
        self.context.weight.data.uniform_(-0.06, 0.06)

    def forward(self, centre: Tensor, context: Tensor, others: Tensor) -> Tensor:
        found, near, far = self.centre(centre), self.context(context), self.context(others)
        score = F.logsigmoid((found * near).sum(1))
        return -(score + F.logsigmoid(-torch.bmm(far, found.unsqueeze(2)).squeeze()).sum(1)).mean()


def test_a_worker_whose_rows_alone_change_a_parameter_keeps_no_other_waiting(accelerator):
    def script(device):
        torch.manual_seed(0)
        model, generator = SkipGram().to(device), torch.Generator().manual_seed(1)
        shapes = ((8,), (8,), (8, 4))
        words = [[torch.randint(0, 30, one, generator=generator).to(device) for one in shapes] for _ in range(4)]
        return trained(model, 0.5, words)

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class Binary(nn.Linear):
    """Computes with signs, and keeps the numbers beside them for the step, as BinaryNet does."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not hasattr(self.weight, "org"):
            self.weight.org = self.weight.data.clone()
        self.weight.data = self.weight.org.sign()
        return F.linear(inputs, self.weight, self.bias)


@pytest.mark.rotating
@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_attributes_that_a_forward_sets_on_parameters_are_those_that_the_script_reads(accelerator, plan):
    def script(device):
        model, losses = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Binary(8, 3)).to(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = F.cross_entropy(model(torch.randn(6, 8).to(device)), torch.randint(0, 3, (6,)).to(device))
            optimizer.zero_grad()
            loss.backward()
            kept = [parameter for parameter in model.parameters() if hasattr(parameter, "org")]
            for parameter in kept:
                parameter.data.copy_(parameter.org)
            optimizer.step()
            for parameter in kept:
                parameter.org.copy_(parameter.data.clamp_(-1, 1))
            losses.append(loss.detach())
        return losses, model.state_dict()

    accelerator(plan)
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
