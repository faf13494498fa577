"""Forwards that add to their model, terms that are zero at first, masks as long as the batch, derivatives forward.

BYOL, whose projector is made in the first call for what a hook sees; two tasks weighted by learned variances, evaluated
before training; a time-first transformer that keeps its mask; a network and its derivative along time. With --ap it has
the one line; prints losses.
"""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import jvp

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


def mlp(dim, hidden, out):
    return nn.Sequential(nn.Linear(dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, out))


class NetWrapper(nn.Module):
    def __init__(self, net, projection_size, hidden_size, layer):
        super().__init__()
        self.net, self.layer = net, layer
        self.projection_size, self.hidden_size = projection_size, hidden_size
        self.projector = None
        self.hook_registered = False

    def _hook(self, _, inputs, output):
        self.hidden = output.flatten(1)

    def forward(self, x):
        if not self.hook_registered:
            dict(self.net.named_modules())[self.layer].register_forward_hook(self._hook)
            self.hook_registered = True
        self.net(x)
        hidden, self.hidden = self.hidden, None
        if self.projector is None:
            self.projector = mlp(hidden.shape[1], self.hidden_size, self.projection_size).to(hidden)
        return self.projector(hidden)


class BYOL(nn.Module):
    def __init__(self, net, projection_size=8, hidden_size=16):
        super().__init__()
        self.online_encoder = NetWrapper(net, projection_size, hidden_size, "1")
        self.online_predictor = mlp(projection_size, hidden_size, projection_size)
        self.target_encoder = None

    def forward(self, one, two):
        prediction_one, prediction_two = (self.online_predictor(self.online_encoder(view)) for view in (one, two))
        with torch.no_grad():
            if self.target_encoder is None:
                self.target_encoder = copy.deepcopy(self.online_encoder).requires_grad_(False)
            target_one, target_two = (self.target_encoder(view).detach() for view in (one, two))
        loss = distance(prediction_one, target_two) + distance(prediction_two, target_one)
        return loss.mean()


def distance(x, y):
    return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(-1)


def self_supervised():
    learner = BYOL(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))).to(device)
    optimizer = None
    for step in range(5):
        one, two = torch.randn(8, 12).to(device), torch.randn(8, 12).to(device)
        loss = learner(one, two)
        optimizer = optimizer or torch.optim.SGD([p for p in learner.parameters() if p.requires_grad], lr=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"byol {step} loss {loss.item():.5f}")
    sizes = [p.abs().sum().item() for p in learner.parameters()]
    print(f"{len(sizes)} parameters, {sum(sizes):.4f}")


class TwoTasks(nn.Module):
    """Losses weighted as by Kendall, Gal and Cipolla (2018), whose logarithms of variances begin at zero."""

    def __init__(self):
        super().__init__()
        self.trunk, self.heads = nn.Linear(6, 16), nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 3)])
        self.log_variances = nn.Parameter(torch.zeros(2))
        self.register_buffer("regulariser", torch.zeros(()))

    def forward(self, x, value, label):
        hidden = self.trunk(x).relu()
        losses = F.mse_loss(self.heads[0](hidden).squeeze(1), value), F.cross_entropy(self.heads[1](hidden), label)
        total = self.regulariser
        for loss, log_variance in zip(losses, self.log_variances):
            total = total + torch.exp(-log_variance) * loss + log_variance
        return total


def several_tasks():
    model = TwoTasks().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    batch = [torch.randn(8, 6), torch.randn(8), torch.randint(0, 3, (8,))]
    batch = [one.to(device) for one in batch]
    for step in range(4):
        with torch.no_grad():
            print(f"tasks before {step} loss {model(*batch).item():.5f}")
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        model.regulariser += 0.1
        print(f"tasks {step} loss {loss.item():.5f}")


class TransformerModel(nn.Module):
    """Time first; the mask of as many steps as there are columns is kept from call to call."""

    def __init__(self, num_words, width):
        super().__init__()
        self.src_mask = None
        self.embedding, self.decoder = nn.Embedding(num_words, width), nn.Linear(width, num_words)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, 32, 0.2), 1)

    def forward(self, src):
        if self.src_mask is None or self.src_mask.size(0) != len(src):
            self.src_mask = nn.Transformer.generate_square_subsequent_mask(len(src)).to(src.device)
        return F.log_softmax(self.decoder(self.encoder(self.embedding(src), mask=self.src_mask)), dim=-1)


def language_model():
    model = TransformerModel(20, 16).to(device)
    words = torch.randint(0, 20, (25, 6)).to(device)
    for step, start in enumerate(range(0, 24, 6)):
        data, target = words[start : start + 6], words[start + 1 : start + 7].reshape(-1)
        model.zero_grad()
        loss = F.nll_loss(model(data).view(-1, 20), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-1.0)
        print(f"words {step} loss {loss.item():.5f}")


def decay():
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(3):
        points = torch.rand(8, 2).to(device)
        along_time = torch.zeros_like(points)
        along_time[:, 1] = 1.0
        u, u_t = jvp(net, (points,), (along_time,))
        loss = (u_t + u).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"decay {step} loss {loss.item():.5f}")


for part in (self_supervised, several_tasks, language_model, decay):
    part()
