"""What public models take and return beside tensors: sparse graphs, batch objects, distributions, old tensor types.

With --ap it has the one line; prints losses.
"""

import sys
from collections import namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Variable
from torch.distributions import Categorical, Normal

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

torch.manual_seed(0)
cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")


def train(name, model, loss_of, steps=3):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        print(f"{name} loss {loss.item():.6f}")


# -- a whole graph, its adjacency sparse -----------------------------------------------------------------------------


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.empty(10, 16)), nn.Parameter(torch.empty(16, 4))
        nn.init.xavier_normal_(self.first)
        nn.init.xavier_normal_(self.second)

    def forward(self, features, adjacency):
        hidden = F.relu(torch.spmm(adjacency, torch.mm(features, self.first)))
        return F.log_softmax(torch.spmm(adjacency, torch.mm(hidden, self.second)), dim=1)


adjacency = (torch.rand(24, 24) > 0.8).float() + torch.eye(24)
adjacency = (adjacency / adjacency.sum(1, keepdim=True)).to_sparse().to(device)
features, labels = torch.rand(24, 10).to(device), torch.randint(0, 4, (24,)).to(device)
known = torch.randperm(24)[:16].to(device)
train("graph", GCN().to(device), lambda m: F.nll_loss(m(features, adjacency)[known], labels[known]))

# -- named tuples that forward defines, a frozen network, gradients through it ---------------------------------------


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.slices = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)])
        for parameter in self.parameters():
            parameter.requires_grad = False

    def forward(self, x):
        early = F.relu(self.slices[0](x))
        outputs = namedtuple("Outputs", ["early", "late"])
        return outputs(early, F.relu(self.slices[1](early)))


def gram_matrix(y):
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


vgg, painter = Features().to(device), nn.Conv2d(3, 3, 3, padding=1).to(device)
picture, style = torch.rand(4, 3, 8, 8).to(device), torch.rand(4, 3, 8, 8).to(device)
wanted = [gram_matrix(y) for y in vgg(style)]


def style_loss(model):
    painted = vgg(model(picture))
    loss = F.mse_loss(painted.late, vgg(picture).late)
    for found, target in zip(painted, wanted):
        loss += 10 * F.mse_loss(gram_matrix(found), target)
    return loss


train("style", painter, style_loss)

# -- a batch that is an object ---------------------------------------------------------------------------------------


class Batch:
    """As data libraries have them."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class Entailment(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(50, 8), nn.LSTM(8, 8, bidirectional=True), nn.Linear(32, 3)

    def encode(self, ids):
        h0 = c0 = self.out.weight.new_zeros(2, ids.size(1), 8)
        _, (hidden, _) = self.rnn(self.embed(ids), (h0, c0))
        return hidden[-2:].transpose(0, 1).contiguous().view(ids.size(1), -1)

    def forward(self, batch):
        return self.out(torch.cat([self.encode(batch.premise), self.encode(batch.hypothesis)], 1))


batch = Batch(premise=torch.randint(0, 50, (7, 8)).to(device), hypothesis=torch.randint(0, 50, (5, 8)).to(device))
answers = torch.randint(0, 3, (8,)).to(device)
train("batch", Entailment().to(device), lambda m: F.cross_entropy(m(batch), answers))

# -- models that return distributions --------------------------------------------------------------------------------


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.choice = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 3)
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return Normal(self.mean(h), self.log_std.exp()), Categorical(logits=self.choice(h))


states, moves, picks = torch.randn(8, 4).to(device), torch.randn(8, 2).to(device), torch.arange(8).to(device) % 3


def policy_loss(model):
    move, pick = model(states)
    return -(move.log_prob(moves).sum(1) + pick.log_prob(picks) + 0.1 * pick.entropy()).mean()


train("policy", Policy().to(device), policy_loss)

# -- tensor types of older scripts -----------------------------------------------------------------------------------

Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor
real = Variable(Tensor(8, 1).fill_(1.0), requires_grad=False)
model = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
if cuda:
    model.cuda()
given = states.cpu().type(Tensor)
print("type", isinstance(given, Tensor), given.type() == states.type(), states.type(torch.FloatTensor).is_cuda)
train("types", model, lambda m: F.mse_loss(m(given), real.type_as(given)))
for parameter in model.parameters():
    parameter.data.clamp_(-0.05, 0.05)
print(f"loss {F.mse_loss(model(given), real).item():.6f} new {given.new(2, 3).zero_().sum():.4f}")

# -- two towers; a scale that the script itself uses; gradients of sorted and cumulated values -------------------------


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(12, 8), nn.Linear(20, 8)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))


images, texts = torch.randn(8, 12).to(device), torch.randn(8, 20).to(device)


def contrastive(model):
    image, text = F.normalize(model.image(images), dim=-1), F.normalize(model.text(texts), dim=-1)
    logits = model.logit_scale.exp() * image @ text.t()
    target = torch.arange(8, device=device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


towers = Towers().to(device)
train("towers", towers, contrastive)
print(f"scale {towers.logit_scale.item():.6f}")
volume = nn.Linear(4, 6).to(device)


def rendered(model):
    alpha = 1.0 - torch.exp(-F.relu(model(states)))
    weights = alpha * torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    return (weights.sort(-1)[0].cumsum(-1)[:, -1] - 0.5).pow(2).mean()


train("rendered", volume, rendered)

# -- objects that lead back to themselves; a dict that forward fills and returns; averages in frozen parameters --------


class Storage:
    pass


class Graphs:
    """Knows its storage, which knows it; its rows are those of several graphs."""

    def __init__(self, x, edges):
        self.storage = Storage()
        self.storage.owner, self.storage.x, self.storage.edges = self, x, edges


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, graphs):
        storage = graphs.storage.owner.storage
        source, target = storage.edges
        hidden = self.lift(storage.x)
        return self.head(torch.zeros_like(hidden).index_add(0, target, hidden[source]).relu())


class Centring(nn.Module):
    """Takes off the mean of the batch, of which it keeps an average; fills the dict that it is given."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8, bias=False)  # a bias has no gradient but rounding
        self.average = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, batch):
        hidden = self.body(batch["x"])
        mean = hidden.mean(0) if self.training else self.average
        if self.training:
            with torch.no_grad():
                self.average.copy_(0.9 * self.average + 0.1 * mean)
        batch["hidden"] = hidden - mean
        return batch


edges = torch.stack([torch.arange(12), (torch.arange(12) + 1) % 12])
graphs = Graphs(torch.randn(12, 6).to(device), edges.to(device))
train("circle", Convolution().to(device), lambda m: (m(graphs) - 1).square().mean())


def filled(model):
    batch = {"x": graphs.storage.x}
    model(batch)
    return (batch["hidden"] - 0.5).abs().mean()


centring = Centring().to(device)
train("filled", centring, filled)
centring.eval()
print(f"filled held out loss {filled(centring).item():.6f} average {centring.average.sum().item():.6f}")
