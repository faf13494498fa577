"""Losses on weights, in the ways of public scripts: penalties, a tied decoder, optimizers that take two gradients.

With --ap it has the one line; prints every loss.
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
X, Y = torch.randn(24, 10), torch.randint(0, 3, (24,))


def make():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)


def batches():
    for i in range(0, 24, 8):
        yield X[i : i + 8].to(device), Y[i : i + 8].to(device)


# -- penalties -----------------------------------------------------------------------------------------------------


def l1(model, before):
    return 0.01 * sum(p.abs().sum() for p in model.parameters())


def accumulated(model, before):
    l2_reg = torch.tensor(0.0).to(device)
    for p in model.parameters():
        l2_reg += torch.norm(p)
    return 0.05 * l2_reg


def elastic(model, before):
    return sum((0.5 * (p - before[name]).pow(2)).sum() for name, p in model.named_parameters())


def orthogonal(model, before):
    weight = model[0].weight
    return 0.1 * (weight @ weight.t() - torch.eye(16, device=device)).pow(2).sum()


for penalty in (l1, accumulated, elastic, orthogonal):
    model = make()
    before = {name: p.clone().detach() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches():
        loss = F.cross_entropy(model(x), y) + penalty(model, before)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        print(f"{penalty.__name__} loss {loss.item():.6f} norm {norm:.6f}")

model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    weights = 0.01 * sum(p.pow(2.0).sum() for p in model.parameters())  # before the model is called at all
    loss = weights + F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"computed before loss {loss.item():.6f}")


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(10, 4)
        self.bias = nn.Parameter(torch.zeros(10))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.tanh(self.l(x))


encoder = Encoder().to(device)
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-2)
for x, _ in batches():
    decoded = F.linear(encoder(x), encoder.l.weight.t(), encoder.bias) * encoder.scale
    loss = F.mse_loss(decoded, x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"tied loss {loss.item():.6f} scale {encoder.scale.item():.6f}")

# -- several losses of several outputs -----------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(10, 16)
        self.heads = nn.ModuleDict({"cls": nn.Linear(16, 3), "reg": nn.Linear(16, 1)})

    def forward(self, batch):
        h = F.relu(self.body(batch["x"]))
        return {"cls": self.heads["cls"](h), "reg": {"value": self.heads["reg"](h), "name": "reg"}}


model = Heads().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in batches():
    out = model({"x": x, "id": ["a"] * 8})
    losses = [F.cross_entropy(out["cls"], y), out["reg"]["value"].pow(2).mean()]
    gradients = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        gradients.append(torch.cat([g.flatten() for g in found]))
    both, start = gradients[0] + gradients[1], 0
    for p in model.parameters():
        p.grad = both[start : start + p.numel()].view_as(p).clone()
        start += p.numel()
    optimizer.step()
    print(f"loss {losses[0].item():.6f} loss {losses[1].item():.6f} dot {torch.dot(*gradients):.6f}")

# -- sharpness-aware minimization ----------------------------------------------------------------------------------


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            scale = group["rho"] / (torch.norm(torch.stack(norms), p=2) + 1e-12)
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


model = make()
optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.1, momentum=0.9)
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.first_step()
    F.cross_entropy(model(x), y).backward()
    optimizer.second_step()
    print(f"SAM loss {loss.item():.6f}")
