"""Trains a model on one device, and on workers that run out of memory after many steps; prints how far they are apart.

    out_of_memory_later.py FAULT...     # where workers run out: "forward", "alone" (one there), "backward" or "step"
    out_of_memory_later.py gone         # a worker is killed, and only one can be started until two can be again

The planner chooses the plans. A worker runs out once, where a file in FATAL_FOLDER says so. The script accumulates and
clips gradients, draws random numbers in the forward, keeps an average of the weights, and reads a large output that was
left on the workers before.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from moreh_ap import device
from moreh_ap.errors import MeshStartError, NotComputedError
from moreh_ap.runtime.launcher import Launcher
from moreh_ap.runtime.recovery import command_log, missing_devices, snapshot_timing

STEPS, AT, BACK_AT = 7, 4, 6
ROWS, LENGTH, WIDTH = 8, 2048, 32
EPS = 1e-3
"""With that of PyTorch, 1e-8, float32 and float64 are 1e-5 apart after eleven steps without any loss: half of the
gradients are larger than 2e-4, but the smallest are 6e-9, and Adam divides each, rounding included, by itself."""
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB."
FOLDER = os.environ["FATAL_FOLDER"]


def run_out(folder, place):
    """Raises what PyTorch raises, if a file says that this worker runs out here."""
    rank = Path("/proc/self/comm").read_text().strip().removeprefix("moreh-worker-")
    file = Path(folder) / f"{place}-{rank}"
    if file.exists():
        file.unlink()
        raise torch.OutOfMemoryError(MESSAGE)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, folder):
        ctx.folder = folder
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        run_out(ctx.folder, "backward")
        return gradient, None


class Model(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.first, self.second = nn.Linear(WIDTH, 128), nn.Linear(128, 1)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, x, y):
        run_out(self.folder, "forward")
        hidden = Fails.apply(self.dropout(torch.tanh(self.first(x) * self.scale[0])), self.folder)
        return ((self.second(hidden) - y) ** 2).mean(), hidden


class Optimizer(torch.optim.AdamW):
    """Runs out in the middle of a step: some parameters have their new values then."""

    def step(self, closure=None):
        super().step(closure)
        if os.environ.get("MOREH_AP_WORKER"):
            run_out(FOLDER, "step")


def lose_a_device():
    """Kills a worker, and has no more than one start; returns what lets others start again."""
    start = Launcher.start

    def start_one(launcher, *how):
        if launcher._request.num_workers > 1:
            raise MeshStartError("Worker 1 cannot be started: its device is gone.")
        return start(launcher, *how)

    Launcher.start = start_one
    os.kill(device.current().session.workers.pids[1], signal.SIGKILL)

    def give_back():
        Launcher.start = start
        device.current().session.workers._launcher._missing._not_before_s = 0.0

    return give_back


def num_devices():
    return device.current().session.num_devices


def arm(fault):
    if fault == "gone":
        return lose_a_device()
    for rank in (1,) if fault in ("alone", "backward") else (0, 1):
        (Path(FOLDER) / f"{'forward' if fault == 'alone' else fault}-{rank}").touch()
    return None


def is_lost(output):
    """Fails unless an output is refused of which one worker's rows have been lost."""
    try:
        output.detach().cpu()
    except NotComputedError as error:
        assert "This value was not computed: the workers had raised" in str(error)
    else:
        raise AssertionError("the rows of the other worker cannot be known")


def train(place, fault):
    """Returns losses, norms, weights, their average, and what was read of outputs."""
    torch.manual_seed(0)
    model, generator = Model(FOLDER).to(place), torch.Generator().manual_seed(1)
    optimizer = Optimizer(model.parameters(), lr=1e-2, eps=EPS)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    found, read, hidden, give_back = [], [], None, None
    for step in range(STEPS + 4 if fault == "gone" else STEPS):
        if give_back is not None and step == BACK_AT:
            assert num_devices() == 1, "the devices that are left"
            give_back()
        for half in range(2):
            x, y = (
                torch.randn(ROWS, LENGTH, WIDTH, generator=generator),
                torch.randn(ROWS, LENGTH, 1, generator=generator),
            )
            if place == "cuda" and (step, half) == (AT, 1):
                give_back = arm(fault)
            before = hidden
            loss, hidden = model(x.to(place), y.to(place))
            (loss / 2).backward()
            if step >= AT and not (fault == "alone" and (step, half) == (AT, 1)):
                read.append(before.detach().cpu())
            elif step >= AT and place == "cuda":
                is_lost(before)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average, model.parameters()):
                mean.lerp_(parameter, 0.5)
        found += [loss.detach(), norm]
        if step % 2:
            print("step", step, loss.item(), flush=True)
    if give_back is not None:
        assert num_devices() == 2, "devices that are there again"
    found += [parameter.detach() for parameter in model.parameters()] + average
    return [one.cpu() for one in found] + read


def main():
    if "SNAPSHOT_STEPS" in os.environ:
        snapshot_timing.STEPS = int(os.environ["SNAPSHOT_STEPS"])
    if "FEW_COMMANDS" in os.environ:
        command_log.FEW_COMMANDS = int(os.environ["FEW_COMMANDS"])
    missing_devices.FIRST_S = missing_devices.LONGEST_S  # nobody tries before the device is there again
    torch.moreh.option.enable_advanced_parallelization(devices=2, mixed_precision=False, plan=os.environ.get("PLAN"))
    for fault in sys.argv[1:]:
        expected, found = train("cpu", fault), train("cuda", fault)
        apart = [
            float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, expected, strict=True)
        ]
        print(f"{fault}: {len(apart)} values, largest difference {max(apart):.2g}", flush=True)
        print(f"left over: {os.listdir(FOLDER)}", flush=True)


if __name__ == "__main__":
    main()
