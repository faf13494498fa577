"""Forwards that do with rows what cannot be told step by step, and batches whose items only their numbers tell apart.

With --ap it has the one line; prints losses.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def train(name, model, batch, steps=3):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)
    for step in range(steps):
        loss = model(*batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{name} loss {loss.item():.6f}")


# -- functions of the number of rows ---------------------------------------------------------------------------------


class AlignmentAndUniformity(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))

    def forward(self, x, y):
        x, y = F.normalize(self.encoder(x), dim=1), F.normalize(self.encoder(y), dim=1)
        n = x.shape[0]
        alignment = (x - y).norm(p=2, dim=1).pow(2).mean()
        uniformity = torch.log((torch.exp(-2 * torch.cdist(x, x).pow(2)).sum() - n) / (n**2 - n))
        information = math.log(n) - F.cross_entropy(x @ y.t() / 0.2, torch.arange(n, device=x.device))
        return alignment + uniformity - information


def two_views(step):
    x = torch.randn(10, 12)
    return x.to(device), (x + 0.1 * torch.randn(10, 12)).to(device)


train("uniformity", AlignmentAndUniformity().to(device), two_views)


class BetaTCVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(20, 8), nn.Linear(4, 20)

    @staticmethod
    def log_density(z, mu, logvar):
        return -0.5 * (math.log(2 * math.pi) + logvar + (z - mu) ** 2 * torch.exp(-logvar))

    def forward(self, x, dataset_size=1000):
        batch_size = x.size(0)
        mu, logvar = self.encoder(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        logpx = -F.binary_cross_entropy_with_logits(self.decoder(z), x, reduction="none").sum(1)
        each = self.log_density(z.view(batch_size, 1, 4), mu.view(1, batch_size, 4), logvar.view(1, batch_size, 4))
        logqz = torch.logsumexp(each.sum(2), dim=1) - math.log(batch_size * dataset_size)
        product = (torch.logsumexp(each, dim=1) - math.log(batch_size * dataset_size)).sum(1)
        prior = self.log_density(z, torch.zeros_like(z), torch.zeros_like(z)).sum(1)
        posterior = self.log_density(z, mu, logvar).sum(1)
        return -(logpx - (posterior - logqz) - 4 * (logqz - product) - (product - prior)).mean()


train("total correlation", BetaTCVAE().to(device), lambda step: (torch.rand(8, 20).to(device),))

# -- rows in a loop of Python, and a part of the rows ----------------------------------------------------------------


class BatchHardTriplets(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8))
        self.ranking_loss = nn.MarginRankingLoss(margin=0.3)

    def forward(self, x, targets):
        inputs = self.encoder(x)
        n = inputs.size(0)
        dist = torch.pow(inputs, 2).sum(dim=1, keepdim=True).expand(n, n)
        dist = (dist + dist.t()).addmm(inputs, inputs.t(), beta=1, alpha=-2).clamp(min=1e-12).sqrt()
        mask = targets.expand(n, n).eq(targets.expand(n, n).t())
        dist_ap, dist_an = [], []
        for i in range(n):
            dist_ap.append(dist[i][mask[i]].max().unsqueeze(0))
            dist_an.append(dist[i][mask[i] == 0].min().unsqueeze(0))
        dist_ap, dist_an = torch.cat(dist_ap), torch.cat(dist_an)
        return self.ranking_loss(dist_an, dist_ap, torch.ones_like(dist_an))


def identities(step):
    targets = torch.arange(4).repeat_interleave(4)
    return (torch.randn(16, 12) + targets[:, None]).to(device), targets.to(device)


train("batch hard", BatchHardTriplets().to(device), identities)


class HardExamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.classes = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x, targets):
        losses = F.cross_entropy(self.classes(torch.relu(self.features(x))), targets, reduction="none")
        hardest, _ = losses.topk(int(0.7 * len(losses)))
        return hardest.mean()


train(
    "hard examples",
    HardExamples().to(device),
    lambda step: (torch.randn(12 + step, 12).to(device), torch.randint(0, 3, (12 + step,)).to(device)),
)

# -- graphs without a vector that names them, boxes that name their picture, packed sequences ------------------------


class Messages(nn.Module):
    """A layer of an equivariant network: messages along edges move the nodes."""

    def __init__(self):
        super().__init__()
        self.edge_mlp = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU())
        self.coord_mlp, self.node_mlp = nn.Linear(16, 1, bias=False), nn.Linear(18, 2)

    def forward(self, h, edges, x, edge_attr):
        row, col = edges
        difference = x[row] - x[col]
        radial = difference.pow(2).sum(1, keepdim=True)
        messages = self.edge_mlp(torch.cat([h[row], h[col], radial, edge_attr], dim=1))
        moved = x.new_zeros(x.shape).index_add(0, row, difference * self.coord_mlp(messages)) / 4
        gathered = h.new_zeros(len(h), 16).index_add(0, row, messages)
        return h + self.node_mlp(torch.cat([h, gathered], dim=1)), x + moved


class Bodies(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Messages(), Messages()])

    def forward(self, h, x, edges, edge_attr, target):
        for layer in self.layers:
            h, x = layer(h, edges, x, edge_attr)
        return F.mse_loss(x, target)


def bodies(step, number=6, nodes=5):
    one = torch.combinations(torch.arange(nodes))
    one = torch.cat([one, one.flip(1)])
    pairs = torch.cat([one + nodes * body for body in range(number)])
    h, x, target = (torch.randn(number * nodes, width).to(device) for width in (2, 3, 3))
    return h, x, [pairs[:, 0].to(device), pairs[:, 1].to(device)], torch.rand(len(pairs), 1).to(device), target


train("bodies", Bodies().to(device), bodies)


class Boxes(nn.Module):
    """Predicts a box and an objectness for each cell; a target names its picture."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1), nn.Conv2d(8, 5, 1))

    def forward(self, images, targets):
        found = self.body(images).permute(0, 2, 3, 1)
        size = found.shape[1]
        picture, (column, row) = targets[:, 0].long(), (targets[:, 1:3] * size).long().t()
        is_object = torch.zeros(found.shape[:3], dtype=torch.bool, device=found.device)
        is_object[picture, row, column] = True
        wanted = torch.zeros(*found.shape[:3], 4, device=found.device)
        wanted[picture, row, column] = targets[:, 1:]
        loss = F.mse_loss(found[..., :4].sigmoid()[is_object], wanted[is_object])
        present, absent = found[..., 4].sigmoid()[is_object], found[..., 4].sigmoid()[~is_object]
        loss = loss + F.binary_cross_entropy(present, torch.ones_like(present))
        return loss + 100 * F.binary_cross_entropy(absent, torch.zeros_like(absent))


def boxes(step):
    counts = torch.tensor([2, 1, 3, 1, 0, 2, 1, 2 + step])
    picture = torch.arange(8).repeat_interleave(counts).float()[:, None]
    targets = torch.cat([picture, 0.9 * torch.rand(len(picture), 2), torch.rand(len(picture), 2)], dim=1)
    return torch.rand(8, 3, 16, 16).to(device), targets.to(device)


train("boxes", Boxes().to(device), boxes)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, dropout=0.4, bidirectional=True)
        self.classes = nn.Linear(24, 3)

    def forward(self, packed, targets):
        _, (hidden, _) = self.lstm(packed)
        return F.cross_entropy(self.classes(torch.cat([hidden[-2], hidden[-1]], dim=1)), targets)


def texts(step):
    lengths = sorted(torch.randint(2, 9, (6,)).tolist(), reverse=True)
    packed = pack_sequence([torch.randn(length, 8) for length in lengths])
    return packed.to(device), torch.randint(0, 3, (6,)).to(device)


train("texts", Reader().to(device), texts)
