"""Has the agent of a host killed while its part of a checkpoint moves here, and then that of the other host, too.

saves_and_loses_a_host.py FOLDER
"""

from __future__ import annotations

import sys

import psutil
import torch

import moreh_ap
from moreh_ap import device
from moreh_ap.errors import WorkerLostError
from moreh_ap.runtime.host.host_connection import HostConnection
from moreh_ap.runtime.recovery import snapshot_timing
from moreh_ap.session.checkpoint.new_checkpoint import NewCheckpoint

NewCheckpoint.make_witness = lambda new: new.path("witness")  # no host finds it: none shares the folder


def lose_with_its_part(rank):
    """Has the host of a worker be lost once it is asked for what that worker has written."""
    take = HostConnection.take_file

    def lost_meanwhile(connection, name, path):
        if name.endswith(f"worker{rank}.safetensors"):
            HostConnection.take_file = take
            parents = psutil.Process(device.current().session.workers.pids[rank]).parents()
            next(one for one in parents if "moreh_ap.runtime.host.remote_agent" in one.cmdline()).kill()
        return take(connection, name, path)

    HostConnection.take_file = lost_meanwhile


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))


def loaded(folder):
    model = build()
    return moreh_ap.load(folder, model=model)["step"], [one.detach() for one in model.parameters()]


def main():
    folder = sys.argv[1]
    snapshot_timing.STEPS = 1  # with a copy, no agent of after the loss can take over from the last one of before
    torch.moreh.option.enable_advanced_parallelization(plan="shard=2", recovery="memory")
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        model(torch.ones(4, 256).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = [one.detach().cpu() for one in model.parameters()]
        if step:
            lose_with_its_part(2 - step)
        try:
            moreh_ap.save(folder, model=model, optimizer=optimizer, extra={"step": step})
        except WorkerLostError as error:
            print(f"step {step}: {error}")
            break
        saved_step, saved = loaded(folder)
        same = all(map(torch.equal, weights, saved))
        print(f"step {step}: that of step {saved_step} is loaded, equal: {same}", flush=True)


if __name__ == "__main__":
    main()
