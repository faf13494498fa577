"""Forwards that change parameters themselves, and modules that are kept in lists of Python, as public scripts do it."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class VectorQuantizerEMA(nn.Module):
    """The codebook of VQ-VAE follows averages: new parameters are put in place of the old ones, in forward."""

    def __init__(self, num_embeddings=12, embedding_dim=6, decay=0.9):
        super().__init__()
        self.embedding = nn.Embedding(num_embeddings, embedding_dim)
        self.embedding.weight.data.normal_()
        self.register_buffer("cluster_size", torch.zeros(num_embeddings))
        self.average = nn.Parameter(torch.randn(num_embeddings, embedding_dim))
        self.decay = decay

    def forward(self, inputs):
        distances = torch.cdist(inputs, self.embedding.weight)
        encodings = F.one_hot(distances.argmin(1), len(self.cluster_size)).float()
        quantized = encodings @ self.embedding.weight
        if self.training:
            self.cluster_size = self.cluster_size * self.decay + (1 - self.decay) * encodings.sum(0)
            n = self.cluster_size.sum()
            self.cluster_size = (self.cluster_size + 1e-5) / (n + 12 * 1e-5) * n
            self.average = nn.Parameter(self.average * self.decay + (1 - self.decay) * (encodings.t() @ inputs))
            self.embedding.weight = nn.Parameter(self.average / self.cluster_size.unsqueeze(1))
        loss = 0.25 * F.mse_loss(quantized.detach(), inputs)
        return inputs + (quantized - inputs).detach(), loss


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantizer, self.decoder = nn.Linear(8, 6), VectorQuantizerEMA(), nn.Linear(6, 8)

    def forward(self, x):
        quantized, loss = self.quantizer(self.encoder(x))
        return F.mse_loss(self.decoder(quantized), x) + loss


class MoCo(nn.Module):
    """The encoder of the keys follows that of the queries, by `.data`, and the keys of before wait in a queue."""

    def __init__(self):
        super().__init__()
        self.encoder_q, self.encoder_k = nn.Linear(8, 5), nn.Linear(8, 5)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(5, 12), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
                param_k.data = param_k.data * 0.9 + param_q.data * 0.1
            shuffled = torch.randperm(len(im_k), device=im_k.device)
            k = F.normalize(self.encoder_k(im_k[shuffled]), dim=1)[shuffled.argsort()]
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        start = int(self.queue_ptr)
        self.queue[:, start : start + len(k)] = k.T
        self.queue_ptr[0] = (start + len(k)) % self.queue.shape[1]
        return torch.cat([positive, negative], dim=1) / 0.2


class Blocks(nn.Module):
    """As in a public N-BEATS: blocks in lists of lists, their parameters beside in a list of parameters."""

    def __init__(self):
        super().__init__()
        self.stacks = [[nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)] for _ in range(2)]
        self.parameters_list = nn.ParameterList(
            p for stack in self.stacks for block in stack for p in block.parameters()
        )

    def forward(self, backcast):
        forecast = torch.zeros_like(backcast)
        for stack in self.stacks:
            for block in stack:
                backcast = backcast - block(backcast)
                forecast = forecast + backcast
        return forecast


def train(name, model, loss_of, steps=4):
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{name} loss {loss.item():.6f}")
    print(f"{name} weights", *(f"{value.float().norm().item():.5f}" for value in model.state_dict().values()))


def batch(*shape):
    return torch.randn(*shape).to(device)


def skip_gram(model):
    return F.cross_entropy(model(torch.randint(0, 10, (6, 2)).to(device)), torch.randint(0, 10, (6,)).to(device))


def contrast(model):
    logits = model(im_q=batch(6, 8), im_k=batch(6, 8))
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=device))


train("codebook", VQVAE().to(device), lambda model: model(batch(7, 8)))
train("momentum", MoCo().to(device), contrast)
max_norm = nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Flatten(), nn.Linear(8, 10))
train("max norm", max_norm.to(device), skip_gram)
train("lists of lists", Blocks().to(device), lambda model: model(batch(5, 8)).pow(2).mean())
normed = nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
wrapped = nn.DataParallel(normed.to(device))
train("wrapped", wrapped, lambda model: model(batch(5, 8)).pow(2).mean())

shared, first, second = nn.Linear(8, 6), nn.Linear(6, 3), nn.Linear(6, 2)
heads = nn.ModuleList([nn.Sequential(shared, first).to(device), nn.Sequential(shared, nn.Tanh(), second).to(device)])
train("two models with one layer", heads, lambda heads: sum(head(batch(4, 8)).pow(2).mean() for head in list(heads)))
