"""Trains models of several kinds, undisturbed and with a worker that is lost after some snapshots, and compares.

survive_kinds.py PLAN
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from moreh_ap import device
from moreh_ap.runtime.recovery import snapshot_timing

sys.path.insert(0, str(Path(__file__).parents[1]))
from own_optimizers import Lamb

STEPS, AT = 6, 4


def batch(generator, *shape):
    return torch.randn(*shape, generator=generator).cuda()


class Noting(nn.Module):
    """Sets attributes, counts its calls and uses what it has counted."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        self.seen = self.norm(self.layer(x))
        return self.seen * (1 + 0.1 * self.num_calls)


def attributes(lose):
    """Running statistics, attributes that the forward sets, an evaluation in between, outputs that are kept."""
    torch.manual_seed(0)
    model, generator, kept = Noting().cuda(), torch.Generator().manual_seed(1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        out = model(batch(generator, 8, 6))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept += [out, model.seen]
        if step == 1:
            model.eval()
            with torch.no_grad():
                kept.append(model(batch(generator, 8, 6)))
            model.train()
        lose(step)
    return [*kept, torch.tensor(model.num_calls), *model.state_dict().values()]


def logits(lose):
    """A loss that the script computes from logits that it keeps; gradients are clipped, and one step is left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 50)).cuda()
    generator, kept = torch.Generator().manual_seed(1), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        ids = torch.randint(0, 50, (8, 9), generator=generator).cuda()
        scores = model(ids)
        loss = functional.cross_entropy(scores.flatten(0, 1), ids.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != 2:  # whose gradients are added to those of the next one
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 1:
            model[1].weight.requires_grad_(False)
            optimizer.param_groups[0]["lr"] = 0.005
        kept += [loss, norm, scores]
        lose(step)
    state = [value.cpu() for one in optimizer.state_dict()["state"].values() for value in one.values()]
    return [*kept, *model.parameters(), *state]


def two_models(lose):
    """Two models and optimizers that take turns; the results of one are inputs of the other."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 6).cuda(), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
    generator, kept = torch.Generator().manual_seed(1), []
    of_maker, of_judge = torch.optim.Adam(maker.parameters(), lr=0.01), torch.optim.RMSprop(judge.parameters(), lr=0.01)
    for step in range(STEPS):
        made, real = maker(batch(generator, 8, 4)), batch(generator, 8, 6)
        of_judge.zero_grad()
        loss = functional.softplus(judge(made.detach())).mean() + functional.softplus(-judge(real)).mean()
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        fooled = functional.softplus(-judge(made)).mean()
        fooled.backward()
        of_maker.step()
        kept += [loss, fooled]
        lose(step)
    return [*kept, *maker.parameters(), *judge.parameters()]


def rarely_quiet(lose):
    """A call whose graph stays open until the script makes the next one: there is no snapshot at most moments."""
    torch.manual_seed(0)
    model, generator, kept = nn.Linear(6, 6).cuda(), torch.Generator().manual_seed(1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = model(batch(generator, 8, 6)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss)
        lose(step)
    return [*kept, *model.parameters()]


def own_optimizer(lose):
    """An optimizer of no library that needs whole parameters, and counts steps in its groups."""
    torch.manual_seed(0)
    model, generator = (
        nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)).cuda(),
        torch.Generator().manual_seed(1),
    )
    optimizer, kept = Lamb(model.parameters()), []
    for step in range(STEPS):
        loss = model(batch(generator, 8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss)
        lose(step)
    state = [value.cpu() for one in optimizer.state_dict()["state"].values() for value in one.values()]
    return [*kept, *model.parameters(), *state, torch.tensor(optimizer.param_groups[0]["step"])]


def main():
    plan, *names = sys.argv[1:]
    snapshot_timing.STEPS = 1
    torch.moreh.option.enable_advanced_parallelization(plan=plan)

    def lose(step):
        if step == AT:
            device.current().session.synchronize()
            os.kill(device.current().session.workers.pids[-1], signal.SIGKILL)

    for name in names:
        expected = [one.cpu() for one in globals()[name](lambda step: None)]
        found = [one.cpu() for one in globals()[name](lose)]
        same = [torch.equal(one, other) for one, other in zip(expected, found, strict=True)]
        print(f"{name}: {sum(same)} of {len(same)} equal", flush=True)


if __name__ == "__main__":
    main()
