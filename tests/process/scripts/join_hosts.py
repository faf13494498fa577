"""Trains while a host joins, is lost and comes back, then as often in one process; prints how far they are apart.

join_hosts.py HOSTS MORE    # the file of hosts, and one whose lines are added to it
join_hosts.py HOSTS         # none is added; the others cannot have all workers of the host that is lost
"""

import sys
import time
from pathlib import Path

import psutil
import torch
from torch import nn

from moreh_ap import device
from moreh_ap.runtime.recovery import joining_hosts, snapshot_timing

ROWS, LENGTH, WIDTH = 12, 256, 32
WITHIN_S = 100.0


class Training:
    """One training, step by step, with the losses and norms of all steps."""

    def __init__(self, place):
        torch.manual_seed(0)
        self.place, self.values = place, []
        layers = nn.Linear(WIDTH, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 1)
        self.model, self.generator = nn.Sequential(*layers).to(place), torch.Generator().manual_seed(1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self):
        for _ in range(2):
            x = torch.randn(ROWS, LENGTH, WIDTH, generator=self.generator).to(self.place)
            loss = (self.model(x) - x.mean(-1, keepdim=True)).square().mean()
            (loss / 2).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.values += [loss.item(), norm.item()]

    def weights(self):
        return torch.cat([parameter.detach().flatten().cpu() for parameter in self.model.parameters()])


def kill_agent(rank):
    """Kills the agent of a worker's host, and with it all of its workers; `moreh-ap host` goes on there."""
    parents = psutil.Process(device.current().session.workers.pids[rank]).parents()
    next(one for one in parents if "moreh_ap.runtime.host.remote_agent" in one.cmdline()).kill()


def main():
    hosts, *more = map(Path, sys.argv[1:])
    snapshot_timing.STEPS, joining_hosts.LOOK_S = 1, 0.5
    torch.moreh.option.enable_advanced_parallelization(hosts=str(hosts), elastic=True, recovery="memory")
    training = Training("cuda")
    training.step()
    session = device.current().session

    def join():
        hosts.write_text(hosts.read_text() + more[0].read_text())

    joins = (
        (join, lambda: session.num_devices == 4),
        (lambda: kill_agent(3), lambda: session.job.losses_survived == 1 and len(session.hosts) == 2),
    )
    fewer = ((lambda: kill_agent(2), lambda: session.job.losses_survived == 1 and session.num_devices == 3),)
    for happens, is_over in joins if more else fewer:
        began_s = time.monotonic()
        happens()
        while not is_over():
            assert time.monotonic() - began_s < WITHIN_S, f"{session.num_devices} workers on {len(session.hosts)} hosts"
            training.step()
            time.sleep(0.05)
        for _ in range(3):
            training.step()
        print(f"{session.num_devices} workers on {len(session.hosts)} hosts, {time.monotonic() - began_s:.1f} s")
    alone = Training("cpu")
    while len(alone.values) < len(training.values):
        alone.step()
    apart = [abs(one - other) / abs(other) for one, other in zip(training.values, alone.values)]
    weights, expected = training.weights(), alone.weights()
    of_weights = float((weights - expected).abs().max() / expected.abs().max())
    print(f"{len(apart)} values, largest difference {max(apart):.2g}, of weights {of_weights:.2g}")


if __name__ == "__main__":
    main()
