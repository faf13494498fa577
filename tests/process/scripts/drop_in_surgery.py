"""Models that are not what their class made of them: normalized weights, pruning, layers exchanged in mid-training.

With --ap it has the one line; prints losses and what state dicts hold.
"""

import copy
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
pictures = torch.randn(8, 3, 6, 6)


def train(name, net, steps=2):
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = net(pictures.to(device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{name} loss {loss.item():.6f}")
    print(name, sorted(net.state_dict()), f"{sum(v.float().sum() for v in net.state_dict().values()):.5f}")
    return net


def make(change):
    return nn.Sequential(change(nn.Conv2d(3, 6, 3)), nn.ReLU(), nn.Flatten(), change(nn.Linear(96, 4)))


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


train("spectral", make(spectral_norm).to(device))
train("old weight norm", make(torch.nn.utils.weight_norm).to(device))
net = train("weight norm", make(parametrizations.weight_norm).to(device))
print(f"weight {net[0].weight.sum().item():.5f}")
parametrize.remove_parametrizations(net[0], "weight")
train("removed", net)
square = nn.Linear(4, 4)
parametrize.register_parametrization(square, "weight", Symmetric())
train("own", nn.Sequential(nn.Flatten(), nn.Linear(108, 4), square).to(device))
net = make(lambda layer: layer)
prune.l1_unstructured(net[0], "weight", amount=0.3)
net = train("pruned", net.to(device))
prune.l1_unstructured(net[3], "weight", amount=0.5)
prune.remove(net[0], "weight")
net = train("pruned again", net)
print(f"zero {100.0 * float(torch.sum(net[3].weight == 0)) / net[3].weight.nelement():.4f}%")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(108, 6)])
        self.more = nn.ModuleDict()
        self.register_buffer("scale", torch.ones(1))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for layer in self.more.values():
            x = x + layer(x)
        return self.head(x * self.scale)


def layer():
    return nn.Linear(6, 6).to(device)


net = train("own net", Net().to(device))
net.layers.append(layer())
train("appended", net)
net.layers.insert(1, layer())
train("inserted", net)
net.more.update({"a": layer(), "b": layer()})
train("updated", net)
net.more.pop("a")
train("popped", net)
net._modules["head"] = nn.Sequential(layer(), nn.ReLU(), nn.Linear(6, 3)).to(device)
train("exchanged", net)
net.register_buffer("scale", torch.full((1,), 0.5, device=device))
train("other buffer", net)
del net.layers[1]
train("deleted", net)
net.head[0].weight.data = torch.eye(6).to(device)
net.head[0].bias = None
train("without bias", net)
net.load_state_dict({name: value.cpu() * 0.5 for name, value in net.state_dict().items()})
train("loaded", net)
for parameter in net.layers.parameters():
    parameter.requires_grad = False
train("frozen", net)
second = copy.deepcopy(net).cpu()
print(f"copy {second(pictures).sum().item():.5f}")
probe = Net()
kept = probe(pictures)  # tried on the CPU before it moves, and the result is kept
train("tried before", probe.to(device))
print(f"kept {F.relu(kept).sum().item():.5f}")


# -- averaged weights, the own ones kept meanwhile; state that forward sets ------------------------------------------


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}

    def update(self):
        for name, p in self.model.named_parameters():
            self.shadow[name] = ((1.0 - self.decay) * p.data + self.decay * self.shadow[name]).clone()

    def apply_shadow(self):
        self.backup = {name: p.data for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            p.data = self.shadow[name]

    def restore(self):
        for name, p in self.model.named_parameters():
            p.data = self.backup[name]


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.hidden = None

    def forward(self, x):
        output, hidden = self.rnn(x.flatten(1, 2), self.hidden)
        self.hidden = hidden.detach()
        y = self.head(output[:, -1])
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y


net = Stateful().to(device)
ema = EMA(net, 0.5)
for _ in range(3):
    train("stateful", net, steps=1)
    ema.update()
    ema.apply_shadow()
    print(f"averaged {sum(p.abs().sum() for p in net.parameters()):.5f}")
    ema.restore()
    print(f"restored {sum(p.abs().sum() for p in net.parameters()):.5f} mean {net.mean.sum():.5f}")
