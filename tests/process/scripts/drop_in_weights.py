"""What scripts do with parameters beside calling the model: penalties, shared matrices, averages, perturbations.

With --ap it has the one line; prints losses, gradients and what averaged weights give.
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Tagger(nn.Module):
    """A conditional random field: a method beside `forward` computes with a parameter of the module."""

    def __init__(self, words=30, tags=4):
        super().__init__()
        self.embed = nn.Embedding(words, 16)
        self.lstm = nn.LSTM(16, 8, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(16, tags)
        self.transitions = nn.Parameter(torch.randn(tags, tags) * 0.1)

    def forward(self, words):
        return self.fc(self.lstm(self.embed(words))[0])

    def neg_log_likelihood(self, words, tags):
        scores = self(words)
        alpha, gold = scores[:, 0], scores[:, 0].gather(1, tags[:, :1])[:, 0]
        for t in range(1, words.size(1)):
            alpha = torch.logsumexp(alpha[:, :, None] + self.transitions[None], 1) + scores[:, t]
            gold = gold + scores[:, t].gather(1, tags[:, t : t + 1])[:, 0]
            gold = gold + self.transitions[tags[:, t - 1], tags[:, t]]
        return (torch.logsumexp(alpha, 1) - gold).mean()


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}
        self.backup = {}

    def update(self):
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                self.shadow[name] = (1.0 - self.decay) * p.data + self.decay * self.shadow[name]

    def apply_shadow(self):
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                self.backup[name] = p.data
                p.data = self.shadow[name]

    def restore(self):
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                p.data = self.backup[name]
        self.backup = {}


class FGM:
    def __init__(self, model):
        self.model, self.backup = model, {}

    def attack(self, epsilon=0.5):
        for name, p in self.model.named_parameters():
            if p.requires_grad and "embed" in name:
                self.backup[name] = p.data.clone()
                p.data.add_(epsilon * p.grad / torch.norm(p.grad))

    def restore(self):
        for name, p in self.model.named_parameters():
            if name in self.backup:
                p.data = self.backup[name]
        self.backup = {}


def fresh():
    torch.manual_seed(0)
    model = Tagger().to(device)
    words, tags = torch.randint(0, 30, (6, 7)).to(device), torch.randint(0, 4, (6, 7)).to(device)
    return model, words, tags


def gradients(model):
    return " ".join("None" if p.grad is None else f"{p.grad.norm().item():.5f}" for p in model.parameters())


model, words, tags = fresh()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
for _ in range(3):
    model.zero_grad()
    loss = model.neg_log_likelihood(words, tags)
    loss.backward()
    print(f"crf loss {loss.item():.6f} {gradients(model)}")
    optimizer.step()

# penalties on weights, before the first call and after
for order in ("before", "after"):
    model, words, tags = fresh()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        penalty = sum(p.pow(2).sum() for p in model.parameters()) if order == "before" else 0.0
        loss = F.cross_entropy(model(words).view(-1, 4), tags.view(-1))
        penalty = penalty if order == "before" else sum(p.abs().sum() for p in model.parameters())
        loss = loss + 1e-3 * penalty
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"penalty {order} loss {loss.item():.6f} norm {norm.item():.6f}")

# the embedding's matrix as the head, in the script; weights changed through a view
model, words, tags = fresh()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(3):
    hidden = F.pad(model(words), (0, 12))
    logits = hidden @ model.embed.weight.t()
    loss = F.cross_entropy(logits.view(-1, 30), words.view(-1)) + model.transitions[0].exp().sum()
    optimizer.zero_grad()
    loss.backward()
    print(f"shared loss {loss.item():.6f} {gradients(model)}")
    optimizer.step()

# averaged weights put in and taken out again, perturbed embeddings
model, words, tags = fresh()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ema, fgm = EMA(model, 0.5), FGM(model)
for _ in range(3):
    loss = F.cross_entropy(model(words).view(-1, 4), tags.view(-1))
    loss.backward()
    fgm.attack()
    adversarial = F.cross_entropy(model(words).view(-1, 4), tags.view(-1))
    adversarial.backward()
    fgm.restore()
    optimizer.step()
    optimizer.zero_grad()
    ema.update()
    print(f"fgm loss {loss.item():.6f} adversarial {adversarial.item():.6f}")
    with torch.no_grad():
        ema.apply_shadow()
        averaged = model.neg_log_likelihood(words, tags).item()
        ema.restore()
        print(f"averaged {averaged:.6f} own {model.neg_log_likelihood(words, tags).item():.6f}")

# frozen, then trained; another dtype; other shapes
model, words, tags = fresh()
for p in model.parameters():
    p.requires_grad = False
model(words)
model.transitions.requires_grad_(True)
model.neg_log_likelihood(words, tags).backward()
print("frozen", gradients(model))
for p in model.parameters():
    p.data = p.data.to(torch.bfloat16)
print("dtype", model(words).dtype, next(model.parameters()).dtype)
model, words, tags = fresh()
model(words)
model.embed.weight.data = torch.cat([model.embed.weight.data, torch.ones(3, 16, device=device)])
print(f"larger {model(words + 3).sum().item():.5f}")
try:
    model.lock = __import__("threading").Lock()  # stays in the script
    print(f"with a lock {model(words).sum().item():.5f}")
finally:
    del model.lock
with torch.inference_mode():
    print(f"rows {(model.embed.weight[:2] * model.fc.weight[0]).sum().item():.5f}")
