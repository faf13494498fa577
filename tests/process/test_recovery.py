"""Workers that are killed while a script trains: others take over, and every number is that of an undisturbed run.

`scripts/survive_losses.py` trains the same model undisturbed and then once for each fault, in one process; what a fault
is, it says. Losses, norms and weights are compared bit for bit.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from user_script import UserScript

from moreh_ap.runtime.recovery import snapshot_timing

pytestmark = pytest.mark.rotating  # one more way to lose a worker each

SCRIPT = "survive_losses.py"
TOOK_OVER = re.compile(
    r"\[info\] (?:Worker \d of \d|The process that supervises the workers) \(process \d+\) died: "
    r"killed by signal 9, Killed\. (?:The workers ended with it\. )?"
    r"Others took over: (\d+) steps? (?:was|were) computed again, \d+\.\d s"
)
WITHIN_S = 60.0  # on a machine that does other things, too


@pytest.fixture
def folders() -> Iterator[dict[str, str]]:
    """Folders of a script, for its faults and for temporary files: short, since sockets are in the latter."""
    with tempfile.TemporaryDirectory(prefix="fatal-") as fatal, tempfile.TemporaryDirectory(prefix="t-") as temporary:
        yield {"FATAL_FOLDER": fatal, "TMPDIR": temporary, "MOREH_RECOVERY": "memory"}


def survive(folders: dict[str, str], tmp_path: Path, plan: str, *faults: str) -> int:
    """Runs the script and compares; returns the largest number of steps that were computed again after a loss."""
    with UserScript(SCRIPT, plan, *faults, cwd=tmp_path, **folders) as script:
        out = script.succeed(timeout_s=280)
    for fault in faults:
        found = re.search(rf"^{fault}: (\d+) of (\d+) equal, ([\d.]+) s\nleft over: \[\]$", out, re.MULTILINE)
        assert found, f"{fault}\n{out}"
        same, all_of, seconds = found.groups()
        assert int(same) == int(all_of) > 20, f"{fault}: {found[0]}"
        assert float(seconds) < WITHIN_S
    taken_over = [line for line in out.splitlines() if "died" in line]
    assert len(taken_over) >= len(faults), out
    losses = list(map(TOOK_OVER.fullmatch, taken_over))
    assert all(losses), taken_over
    assert out.count("MoAI Accelerator is ready") == 1, "one line is all that the script sees of a loss"
    leaves_no_files(folders)
    assert out.count("are on disk: two need") == ("FREE_MEMORY" in folders), out
    return max(int(loss[1]) for loss in losses if loss is not None)


def leaves_no_files(folders: dict[str, str]) -> None:
    """Fails if a file is left in the folder for temporary files; PyTorch makes a folder there that is to stay."""
    left = [path.name for path in Path(folders["TMPDIR"]).iterdir() if not path.name.startswith("torchinductor_")]
    assert not left, f"{left} are left in the folder for temporary files"


def test_a_worker_that_dies_anywhere_in_a_step_of_sharded_training(folders, tmp_path):
    survive(folders, tmp_path, "shard=2", "forward", "backward", "optimizer")


def test_a_worker_that_dies_between_steps_and_both_at_once(folders, tmp_path):
    survive(folders, tmp_path, "shard=2", "evaluation", "two", "idle")


def test_a_worker_that_dies_in_replicated_training_and_again_while_others_take_over(folders, tmp_path):
    survive(folders, tmp_path, "replicate=2", "again", "backward", "random")


@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2,micro_batches=2"])
def test_a_worker_that_dies_under_plans_that_split_the_model(folders, tmp_path, plan):
    survive(folders, tmp_path, plan, "sent forward", "sent backward", "random")


def test_the_process_that_supervises_the_workers_is_replaced_without_what_forks_them(folders, tmp_path):
    survive(folders, tmp_path, "tensor=2", "supervisor", "sent forward", "supervisor")


FEW = 4
"""More steps than a snapshot after every step leaves to be computed again, and fewer than there are without one."""


@pytest.mark.parametrize(
    "plan, faults",
    [
        ("shard=2", ("forward", "snapshot", "two", "idle")),
        ("replicate=2", ("optimizer", "snapshot", "again", "random")),
    ],
)
def test_a_loss_after_snapshots_costs_the_steps_since_the_last_one(folders, tmp_path, plan, faults):
    assert survive({**folders, "SNAPSHOT_STEPS": "1"}, tmp_path, plan, *faults) <= FEW


def test_recovery_that_is_on_by_itself_replaces_workers_before_and_after_the_first_copy(folders, tmp_path):
    by_itself = {**folders, "MOREH_RECOVERY": "auto"}
    survive(by_itself, tmp_path, "shard=2", "backward")
    assert survive({**by_itself, "SNAPSHOT_STEPS": "1"}, tmp_path, "shard=2", "snapshot", "idle") <= FEW


def test_where_memory_is_short_copies_are_on_disk(folders, tmp_path):
    short = {**folders, "SNAPSHOT_STEPS": "1", "FREE_MEMORY": "1000"}
    assert survive(short, tmp_path, "shard=2", "backward", "snapshot", "idle") <= FEW


HYBRID = "shard=2,tensor=2", "replicate=2,pipeline=2"


@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2,micro_batches=2", *HYBRID])
def test_a_loss_after_snapshots_under_plans_that_split_the_model(folders, tmp_path, plan):
    faults = "sent forward", "sent backward", "random", "idle"
    assert survive({**folders, "SNAPSHOT_STEPS": "1"}, tmp_path, plan, *faults) <= FEW


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_snapshots_have_all_that_workers_hold(folders, tmp_path, plan):
    kinds = "attributes", "logits", "own_optimizer", "two_models", "rarely_quiet"
    with UserScript("survive_kinds.py", plan, *kinds, cwd=tmp_path, **folders) as script:
        out = script.succeed(timeout_s=280)
    found = {name: (int(same), int(all_of)) for name, same, all_of in re.findall(r"(\w+): (\d+) of (\d+) equal", out)}
    assert list(found) == list(kinds) and all(same == all_of > 7 for same, all_of in found.values()), found
    steps = [int(loss[1]) for loss in map(TOOK_OVER.fullmatch, out.splitlines()) if loss is not None]
    assert len(steps) == 5 and max(steps[:3]) <= FEW, "there is a snapshot between any two steps"
    assert steps[3] <= 3 * FEW, "two steps a turn, and a snapshot in one of its four forwards: 20 without"
    leaves_no_files(folders)


LONG = """
import os, signal, torch
from torch import nn
from moreh_ap import device

torch.moreh.option.enable_advanced_parallelization(plan="shard=2", recovery="memory")


def train(place):
    torch.manual_seed(0)
    model, generator = nn.Linear(4, 4).to(place), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(620):
        loss = (model(torch.randn(4, 4, generator=generator).to(place)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            loss.item()
    if place == "cuda":
        os.kill(device.current().session.workers.pids[0], signal.SIGKILL)
    return model.weight.detach().cpu()


print("largest difference", float((train("cuda") - train("cpu")).abs().max()))
"""


def test_after_many_steps_a_loss_costs_those_since_the_last_snapshot(folders, tmp_path):
    with UserScript("-c", LONG, cwd=tmp_path, **folders) as script:
        out = script.succeed(timeout_s=200)
    (lost,) = [loss for loss in map(TOOK_OVER.fullmatch, out.splitlines()) if loss is not None]
    assert int(lost[1]) <= snapshot_timing.MOST_STEPS + 20, "the steps of two reads of a loss were on their way"
    assert "ends the run" not in out
    assert float(out.rpartition("largest difference")[2]) < 1e-5


def test_a_command_that_kills_workers_every_time_ends_the_run(folders, tmp_path):
    with UserScript(SCRIPT, "shard=2", "for ever", cwd=tmp_path, **folders) as script:
        assert script.wait(timeout_s=200) == 1
        assert "died: killed by signal 9" in script.err
        assert "The run cannot go on: workers were lost 4 times at the same command." in script.err
        assert script.err.count("WorkerLostError: Worker 1 of 2") == 1
        script.leaves_nothing()


def test_without_recovery_a_lost_worker_ends_the_run(folders, tmp_path):
    with UserScript(SCRIPT, "shard=2", "forward", cwd=tmp_path, **{**folders, "MOREH_RECOVERY": "off"}) as script:
        assert script.wait() == 1
        assert "WorkerLostError: Worker 1 of 2" in script.err and "cannot go on" not in script.err
        assert "took over" not in script.out
        script.leaves_nothing()


GOES_ON = """
import os, signal, sys, torch
from moreh_ap import device, load, save
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

def enable():
    torch.moreh.option.enable_advanced_parallelization(plan="shard=2")

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x).square().mean()
        loss.backward()
        if step % 2:
            clip_grad_norm_(model.parameters(), 0.1)
        else:
            norm = get_total_norm([one.grad for one in model.parameters()])
            clip_grads_with_norm_(model.parameters(), 0.1, norm)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()

def refused(work):
    try:
        work()
    except Exception as error:
        print(type(error).__name__, str(error).splitlines())

enable()
whole = list(train(*build(), range(6)))
old, old_optimizer = build()
found = list(train(old, old_optimizer, range(3)))
save(sys.argv[1], model=old, optimizer=old_optimizer)
lost = device.current().session
os.kill(lost.workers.pids[1], signal.SIGKILL)
refused(lambda: list(train(old, old_optimizer, range(3, 6))))
refused(lambda: build()[0](torch.ones(2, 8).cuda()))
enable()
model, optimizer = build()
load(sys.argv[1], model=model, optimizer=optimizer)
found += train(model, optimizer, range(3, 6))
print("equal", found == whole, device.current().session is not lost)
refused(lambda: old(torch.ones(2, 8).cuda()))
refused(lambda: next(old.parameters()).cpu())
refused(lambda: load(sys.argv[1], model=old, optimizer=old_optimizer))
refused(old_optimizer.step)
"""


def test_the_line_once_more_starts_others_for_a_model_that_loads_its_checkpoint(folders, tmp_path):
    folders["MOREH_RECOVERY"] = "off"
    with UserScript("-c", GOES_ON, tmp_path / "saved", cwd=tmp_path, **folders) as script:
        out = script.succeed()
    first, *later = [line for line in out.splitlines() if line.startswith("WorkerLostError")]
    assert "Worker 1 of 2" in first and "killed by signal 9" in first
    assert len(later) == 5 and all("The workers are stopped" in line for line in later), out
    assert all("Try: torch.moreh.option.enable_advanced_parallelization()" in line for line in later)
    assert "equal True True" in out
    leaves_no_files(folders)


LOST_AT_START = """
import os, torch
from torch import nn
from moreh_ap.runtime.hangs import hang_watch

hang_watch.HANG_S = 2.0
torch.moreh.option.enable_advanced_parallelization(plan="shard=2")
torch.manual_seed(0)
model = nn.Linear(4, 4).cuda()
print("loss", model(torch.ones(4, 4).cuda()).sum().item())
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_that_are_lost_while_they_join_each_other_are_replaced(folders, tmp_path, sent):
    with UserScript("-c", LOST_AT_START, cwd=tmp_path, **folders) as script:
        deadline_s = time.monotonic() + 100
        while not (found := script.workers()) and time.monotonic() < deadline_s:
            time.sleep(0.005)
        os.kill(next(iter(found.values())), sent)
        out = script.succeed(timeout_s=200)
    lost = r"^\[info\] (?:While the workers were joining|A worker process ended while).* Others start in their place"
    assert len(re.findall(lost, out, re.MULTILINE)) == 1 and "\nloss " in out, out


ONE_BUFFER = """
import os, signal, torch
from torch import nn
from moreh_ap import device

torch.moreh.option.enable_advanced_parallelization(plan="replicate=2", recovery="memory")


def train(place):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.ones(1, 3, 24, 24))
    model = model.to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    host = torch.empty(8, 3, 24, 24).to(memory_format=torch.channels_last)
    there = torch.empty(8, 3, 24, 24, device=place)
    losses = []
    for step in range(6):
        there.copy_(host.normal_().to(place))
        moved = host.to(place, torch.float32, copy=True)
        host.fill_(float("nan"))
        loss = model(moved).square().mean() + model(there).mean()
        loss.backward()
        moved.fill_(float("nan"))  # the workers may not have answered
        there.fill_(float("nan"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == 3 and place == "cuda":
            os.kill(device.current().session.workers.pids[0], signal.SIGKILL)
    return torch.stack(losses).cpu()


there, here = train("cuda"), train("cpu")
print("largest difference", float(((there - here) / here).abs().max()))
"""


def test_batches_that_a_script_overwrites_after_the_call_are_sent_again_as_they_were(folders, tmp_path):
    (tmp_path / "one_buffer.py").write_text(ONE_BUFFER)
    with UserScript("one_buffer.py", cwd=tmp_path, **folders) as script:
        out = script.succeed()
    assert TOOK_OVER.search(out), out
    assert float(out.rpartition("largest difference")[2]) < 1e-5


TRAINED_FOR_LONG = """
import os, signal, torch
from torch import nn
from moreh_ap import device
from moreh_ap.runtime.recovery import command_log

command_log.MOST_STEPS = 3
torch.moreh.option.enable_advanced_parallelization(plan="shard=2", recovery="memory")
model = nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    model(torch.ones(4, 4).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(model.weight.cpu().sum().item())
os.kill(device.current().session.workers.pids[0], signal.SIGKILL)
print(model.weight.cpu())
"""


def test_a_run_that_cannot_be_replayed_any_more_says_why(folders, tmp_path):
    with UserScript("-c", TRAINED_FOR_LONG, cwd=tmp_path, **folders) as script:
        assert script.wait() == 1
        why = "more than 3 steps would have to be computed again"
        assert script.out.count(f"[info] a worker that is lost from now on ends the run: {why}\n") == 1
        assert re.search(rf"died: killed by signal 9, Killed\.[^\n]* The run cannot go on: {why}\.", script.err)
        script.leaves_nothing()
    leaves_no_files(folders)
