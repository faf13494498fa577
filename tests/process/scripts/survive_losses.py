"""Trains the same model twice, undisturbed and with workers that are killed, and prints the losses of both.

    survive_losses.py PLAN FAULT...     # FAULT: where a worker is killed, see `main`

A layer of the model kills the worker that it runs in, where a file says so.
"""

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moreh_ap import device
from moreh_ap.runtime.hangs import hang_watch
from moreh_ap.runtime.recovery import copy_memory, snapshot_timing
from moreh_ap.runtime.worker.snapshots.slot_memory import SlotMemory

STEPS, AT = 6, 3
LOCK_S = float(os.environ.get("LOCK_S", "12"))
ROWS = int(os.environ.get("ROWS", "8"))
FOLDER = Path(os.environ["FATAL_FOLDER"])


def is_told(folder, place):
    """Returns whether a file says that something happens to this worker here; of several such files it takes one."""
    name = Path("/proc/self/comm").read_text().strip()
    for file in sorted(Path(folder).glob(f"{place}-{name.removeprefix('moreh-worker-')}-*")):
        file.unlink()
        return True
    return False


def die(folder, place):
    """Kills this process if a file says that this worker dies here."""
    if is_told(folder, place):
        time.sleep(0.2)  # the others go on to where they wait for this one
        os.kill(os.getpid(), signal.SIGKILL)


def stop(folder):
    """Has this worker be silent, if a file says so: stopped, in a collective of its own, or without fault."""
    if is_told(folder, "stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif is_told(folder, "collective"):
        dist.recv(torch.empty(1), src=0, tag=77)  # nobody sends it
    elif is_told(folder, "lock"):  # native code that keeps the interpreter's lock
        later = subprocess.Popen(["sh", "-c", f"sleep {LOCK_S}; echo"], stdout=subprocess.PIPE)
        assert ctypes.PyDLL(None).read(later.stdout.fileno(), ctypes.create_string_buffer(1), 1) == 1
        later.wait()


class DyingOnTheWay(list):
    """Values of which the second one is never written: the worker dies when all are gone through a second time."""

    times, folder = 0, ""

    def __iter__(self):
        self.times += 1
        for index, value in enumerate(super().__iter__()):
            if (self.times, index) == (2, 1):
                die(self.folder, "snapshot")
            yield value


def break_snapshots_off(folder):
    """Has this worker die while it writes its next snapshot, if a file says so."""
    write = SlotMemory.write

    def write_some(slot, number, description, values):
        dying = DyingOnTheWay(values)
        dying.folder = folder
        write(slot, number, description, dying)

    SlotMemory.write = write_some


class Fatal(torch.autograd.Function):
    @staticmethod
    def forward(context, x, folder):
        context.folder = folder
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        die(context.folder, "backward")
        return gradient, None


class Passing(nn.Module):
    """Changes nothing. A worker that is to die dies in its forward, in its backward, or at the optimizer's step."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def forward(self, x):
        die(self.folder, "forward")
        stop(self.folder)
        if any(Path(self.folder).glob("optimizer-*")):
            register_optimizer_step_pre_hook(lambda *of_step: die(self.folder, "optimizer"))
        if any(Path(self.folder).glob("snapshot-*")):
            break_snapshots_off(self.folder)
        return Fatal.apply(x, self.folder)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.down(self.dropout(torch.relu(self.up(x))))


def build(plan):
    torch.manual_seed(0)
    if "tensor" in plan or "pipeline" in plan:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                             num_attention_heads=2, num_key_value_heads=2, use_cache=False)  # fmt: skip
        return LlamaForCausalLM(config)
    return nn.Sequential(nn.Linear(16, 32), Passing(str(FOLDER)), Block(), Block(), nn.Linear(32, 4))


def loss_of(model, generator):
    if isinstance(model, nn.Sequential):
        return model(torch.randn(ROWS, 16, generator=generator).cuda()).square().mean()
    ids = torch.randint(0, 64, (8, 12), generator=generator).cuda()
    return model(input_ids=ids, labels=ids).loss


def kill(rank):
    os.kill(device.current().session.workers.pids[rank], signal.SIGKILL)


def kill_agents(ranks):
    """Kills the agents of workers' hosts, and with them all of their workers."""
    for pid in [device.current().session.workers.pids[rank] for rank in ranks]:
        parents = psutil.Process(pid).parents()
        next(one for one in parents if "moreh_ap.runtime.host.remote_agent" in one.cmdline()).kill()


def kill_supervisor():
    """Kills the agent of this machine, and with it all workers; returns what had forked them."""
    forked_by = what_forks_workers()
    next(one for one in psutil.Process().children() if "moreh_ap.runtime.host.agent" in one.cmdline()).kill()
    return forked_by


def what_forks_workers():
    """Returns the process ids of the workers' parents."""
    return {psutil.Process(pid).ppid() for pid in device.current().session.workers.pids}


def kill_soon():
    """Kills a worker at a random moment from now, unless none is there then, since others are about to take over."""

    def now():
        with contextlib.suppress(IndexError, ProcessLookupError):
            kill(random.randrange(2))

    timer = threading.Timer(random.uniform(0.0, 0.1), now)
    timer.start()
    return timer


def train(plan, fault, losses):
    """Trains with accumulation, clipping, a schedule and an evaluation, and has a worker die in step `AT`."""
    model, generator = build(plan).cuda(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    timers, forked_by = [], None
    for step in range(STEPS):
        if fault == "random" and step in (1, AT, 4):
            timers.append(kill_soon())
        now = fault if step == AT else ""
        if now in ("forward", "backward", "optimizer", "snapshot", "stopped", "collective", "lock"):
            (FOLDER / f"{now}-1-0").touch()
        elif now == "two":
            (FOLDER / "backward-0-0").touch()
            (FOLDER / "backward-1-0").touch()
        elif now == "again":  # once more while the others are told what was answered, then in both
            (FOLDER / "forward-1-0").touch()
            (FOLDER / "forward-1-1").touch()
            (FOLDER / "forward-0-2").touch()
        elif now == "for ever":
            for number in range(4):
                (FOLDER / f"forward-1-{number}").touch()
        for _ in range(2):
            loss = loss_of(model, generator) / 2
            losses.append(loss)
            if now in ("agent", "agents"):
                kill_agents([1] if now == "agent" else [0, 1])
                now = ""
            if now == "supervisor":
                forked_by, now = kill_supervisor(), ""
            if now == "sent forward":
                kill(1)
            loss.backward()
            if now == "sent backward":
                kill(0)
            now = "" if now.startswith("sent") and now != "sent step" else now
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if now == "sent step":
            kill(1)
        if step % 2:
            losses += [norm, loss]
            print("step", step, loss.item(), flush=True)
        optimizer.zero_grad()
        schedule.step()
    if fault == "evaluation":
        (FOLDER / "forward-1-0").touch()
    for timer in timers:
        timer.join()
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(model, generator))
    losses += [parameter.detach() for parameter in model.parameters()]
    values = [one.cpu() for one in losses]
    assert forked_by is None or forked_by == what_forks_workers(), "PyTorch was imported once more"
    if fault == "idle":
        kill(0)
        time.sleep(1.0)
        weights = [parameter.detach().cpu() for parameter in model.parameters()]
        assert all(map(torch.equal, weights, values[-len(weights) :]))
    return values


def main():
    """FAULT: a place in a step, "two" workers, "again" during recovery, "random", "evaluation", "idle", "for ever",
    "supervisor" (of this machine), "agent" and "agents" (of several hosts), or a way to be silent, see `stop`."""
    plan, *faults = sys.argv[1:]
    random.seed(plan)
    if "SNAPSHOT_STEPS" in os.environ:
        snapshot_timing.STEPS = int(os.environ["SNAPSHOT_STEPS"])
    if "FREE_MEMORY" in os.environ:
        copy_memory.free_memory = lambda: int(os.environ["FREE_MEMORY"])
    hang_watch.HANG_S = float(os.environ.get("HANG_S", hang_watch.HANG_S))
    torch.moreh.option.enable_advanced_parallelization(plan=plan)
    expected = train(plan, "", [])
    assert expected[0] != expected[-1].sum()
    for fault in faults:
        started_s = time.monotonic()
        found = train(plan, fault, [])
        same = [torch.equal(one, other) for one, other in zip(expected, found, strict=True)]
        print(f"{fault}: {sum(same)} of {len(same)} equal, {time.monotonic() - started_s:.1f} s", flush=True)
        print(f"left over: {[file.name for file in FOLDER.iterdir()]}", flush=True)


if __name__ == "__main__":
    main()
