"""Training checkpoints: saved under one plan, loaded under another, and the losses go on as if nothing had happened.

They are compared with one process without the one line. What is loaded into starts from another seed, so that every
number has to come from the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import uuid
from pathlib import Path

import pytest
import torch
from checkpoint_runs import ROWS, Run, files, weights
from one_line_models import ragged_batches, tiny_gpt2
from torch import Tensor, nn

import moreh_ap
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import LoadError
from moreh_ap.session.state_tensors import OnWorkers

pytestmark = pytest.mark.rotating  # one more plan or format each

FOUR_TWO_ONE = ["replicate=2,shard=2", "replicate=2", "tensor=2", "shard=2", "replicate=1", "pipeline=2"]
OFFLOADED = ["shard=2,replicate=2,offload=all", "tensor=2", "offload=all", "shard=2", "micro_batches=2,offload=all"]


class OwnMomentum(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(0.5).add_(parameter.grad)
                parameter.sub_(state["momentum"], alpha=group["lr"])


@pytest.fixture(scope="module")
def uninterrupted():
    """Losses of one process."""
    return Run("cpu", 0).train(5 + 2 * len(FOUR_TWO_ONE))


@pytest.mark.parametrize("plan", ["shard=2,tensor=2", "tensor=2,pipeline=2", "shard=2,pipeline=2"])
def test_parts_of_parts_come_back(accelerator, tmp_path, plan):
    """What two axes cut is read by four workers and written by them: the same bits."""
    before = Run("cpu", seed=0)
    before.train(2)
    before.save(tmp_path)
    accelerator(plan)
    run = Run("cuda", seed=1)
    with torch.no_grad():
        run.model(**{key: value.cuda() for key, value in ragged_batches(1, ROWS)[0].items()}, use_cache=False)
    run.load(tmp_path)
    run.save(tmp_path)
    assert len(files(tmp_path, "worker*")) == 4
    after = Run("cpu", seed=2).load(tmp_path)
    torch.testing.assert_close(weights(after.model), weights(before.model), rtol=0, atol=0)
    torch.testing.assert_close(after.optimizer.state_dict(), before.optimizer.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("plans", [FOUR_TWO_ONE, OFFLOADED], ids=["on the device", "in host memory"])
def test_every_plan_goes_on_where_another_stopped(accelerator, tmp_path, uninterrupted, plans):
    """On 4, 2, 1 and 2 workers, and after each plan a plain model in one process."""
    losses, num_before = [], 0
    for leg, plan in enumerate(plans):
        session = accelerator(plan)
        run = Run("cuda", seed=100 + leg)
        if leg == 0:
            run = Run("cuda", seed=0)
            losses += run.train(3)
        else:
            run.load(tmp_path)
        losses += run.train(2)
        run.save(tmp_path)
        plain = Run("cpu", seed=200 + leg).load(tmp_path)
        assert type(plain.model.model.embed_tokens.weight) is nn.Parameter
        begun = len(losses)
        assert plain.train(2) == pytest.approx(uninterrupted[begun : begun + 2], rel=1e-6), plan
        assert len(files(tmp_path, "*worker*")) <= num_before + session.num_devices, "two checkpoints are kept"
        num_before = session.num_devices
    assert losses == pytest.approx(uninterrupted[: len(losses)], rel=1e-6)


@pytest.fixture(params=["replicate=2", "shard=2", "tensor=2", "pipeline=2"])
def two_workers(request, accelerator):
    return accelerator(request.param)


def test_loading_into_what_is_in_use(two_workers, tmp_path):
    run = Run("cuda", seed=0, make=tiny_gpt2)
    run.train(3)
    run.save(tmp_path)
    expected, trained = run.train(2), weights(run.model)
    again = run.load(tmp_path)
    assert again.train(2) == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(weights(run.model), trained, rtol=1e-6, atol=1e-7)

    other = Run("cuda", seed=1, make=tiny_gpt2)
    other.train(1)
    assert other.load(tmp_path).train(2) == pytest.approx(expected, rel=1e-6)


def test_save_pretrained_is_read_without_the_line(two_workers, tmp_path):
    from transformers import AutoModelForCausalLM

    run = Run("cuda", seed=0, make=tiny_gpt2)
    run.train(2)
    run.model.eval()
    batch = ragged_batches(1, ROWS)[0]
    run.model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        there = run.model(**{key: value.cuda() for key, value in batch.items()}).logits.cpu()
        here = plain(**batch).logits
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "plain": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}),
    "fused": (torch.optim.Adam, {"lr": 1e-3, "fused": True}),
    "own": (OwnMomentum, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on(accelerator, tmp_path, name):
    kind, settings = OPTIMIZERS[name]
    accelerator("shard=2")
    settings = {"optimizer": kind, **settings}
    expected = Run("cpu", seed=0, **settings).train(5)
    run = Run("cuda", seed=0, **settings)
    run.train(3)
    run.save(tmp_path)
    accelerator("replicate=2")
    assert Run("cuda", seed=1, **settings).load(tmp_path).train(2) == pytest.approx(expected[3:], rel=1e-6)
    assert Run("cpu", seed=2, **settings).load(tmp_path).train(2) == pytest.approx(expected[3:], rel=1e-6)
    used = Run("cuda", seed=3, **settings)
    used.train(1)
    assert used.load(tmp_path).train(2) == pytest.approx(expected[3:], rel=1e-6)
    state = used.optimizer.state[next(used.model.parameters())].values()
    assert all(isinstance(value._cell.value, OnWorkers) for value in state if isinstance(value, VirtualTensor))


@pytest.mark.parametrize("fused", [False, True])
def test_step_counts_are_where_the_optimizer_wants_them(accelerator, tmp_path, fused):
    """PyTorch refuses a count on the device without `fused`, and one in host memory with it."""
    accelerator("shard=2")
    run = Run("cuda", seed=0, optimizer=torch.optim.Adam, fused=fused)
    run.train(1)
    run.save(tmp_path)
    unread = Run("cuda", seed=1, optimizer=torch.optim.Adam, fused=fused).load(tmp_path)
    assert all(state["step"].is_cuda == fused and state["exp_avg"].is_cuda for state in unread.optimizer.state.values())


def test_an_optimizer_that_had_not_stepped_loses_its_state(accelerator, tmp_path):
    accelerator("shard=2")
    run = Run("cuda", seed=0)
    run.save(tmp_path)
    expected = run.train(2)
    assert run.load(tmp_path).train(2) == pytest.approx(expected, rel=1e-6)


def test_a_checkpoint_may_be_replaced_before_it_is_read(accelerator, tmp_path):
    """Values that no worker has read yet lie in the very files that the new checkpoint replaces."""
    accelerator("shard=2")
    first = Run("cuda", seed=0)
    first.train(2)
    first.save(tmp_path)
    unread = Run("cuda", seed=1).load(tmp_path)
    unread.save(tmp_path)
    expected = first.train(2)
    assert unread.train(2) == pytest.approx(expected, rel=1e-6)
    assert Run("cuda", seed=2).load(tmp_path).train(2) == pytest.approx(expected, rel=1e-6)


def test_dropout_goes_on(accelerator, tmp_path):
    accelerator("shard=2")

    def run(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)).cuda()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    x = torch.ones(4, 8).cuda()
    model, optimizer = run(0)
    model(x)
    moreh_ap.save(tmp_path, model=model, optimizer=optimizer)
    expected = [model(x).cpu(), model(x).cpu()]
    model, optimizer = run(1)
    moreh_ap.load(tmp_path, model=model, optimizer=optimizer)
    torch.testing.assert_close([model(x).cpu(), model(x).cpu()], expected)


def test_a_failed_save_leaves_the_earlier_checkpoint_and_the_run(accelerator, tmp_path, monkeypatch):
    accelerator("shard=2")
    run = Run("cuda", seed=0)
    run.train(2)
    run.save(tmp_path)
    before = sorted(os.listdir(tmp_path))
    expected = run.train(1)

    chosen = uuid.UUID("feedbeef" + "0" * 24)
    monkeypatch.setattr(uuid, "uuid4", lambda: chosen)
    obstacle = tmp_path / "feedbeef-worker1.safetensors~"
    obstacle.symlink_to(tmp_path / "nowhere" / "file")  # in the way of one worker alone
    with pytest.raises(OSError, match=r"feedbeef-worker1\.safetensors: FileNotFoundError"):
        run.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before

    def refuse(*names: object) -> None:
        raise OSError("no renaming today")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="no renaming today"):
            run.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    run.train(1)  # the workers are as good as before
    assert run.load(tmp_path).train(1) == pytest.approx(expected, rel=1e-6)


def test_a_full_disk_leaves_the_earlier_checkpoint_and_the_run(accelerator, tmp_path):
    """A limit on the size of files stands for a full disk: the system refuses to go on in the middle of a file."""
    session = accelerator("shard=2")
    run = Run("cuda", seed=0)
    run.train(2)
    run.save(tmp_path)
    expected = run.train(2)
    run.load(tmp_path)
    run.train(1)
    before = sorted(os.listdir(tmp_path))
    (pid, *_) = session.workers.pids
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match=r"-worker0\.safetensors: OSError: .*File too large"):
        run.save(tmp_path)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir(tmp_path)) == before
    assert run.train(1) == pytest.approx(expected[1:], rel=1e-6)
    assert run.load(tmp_path).train(2) == pytest.approx(expected, rel=1e-6)
    run.save(tmp_path)
    assert run.load(tmp_path).step == 4


def test_workers_find_damage(accelerator, tmp_path):
    accelerator("shard=2")
    run = Run("cuda", seed=0)
    run.train(1)
    run.save(tmp_path)
    file = files(tmp_path, "worker1")[0]
    data = bytearray(file.read_bytes())
    data[-5] ^= 16
    file.write_bytes(data)
    with pytest.raises(LoadError, match=rf"{file.name} is damaged: its contents are not what was written"):
        run.load(tmp_path)
    run.train(1)  # nothing was changed, nobody has ended


def test_every_element_is_written_once(two_workers, tmp_path):
    run = Run("cuda", seed=0)
    run.train(1)
    run.save(tmp_path)
    content = json.loads((tmp_path / "checkpoint.json").read_text())
    for name, entry in content["tensors"].items():
        count = torch.zeros(entry["shape"])
        for piece in entry["pieces"]:
            count[tuple(slice(a, a + n) for a, n in zip(piece["start"], piece["size"]))] += 1
        assert (count == 1).all(), name
    total = sum(parameter.numel() for parameter in run.model.parameters()) * 4 * 3
    written = [file.stat().st_size for file in files(tmp_path, "worker*")]
    assert total <= sum(written) <= total + 20_000 * len(written)
    if str(two_workers.options.plan) == "shard=2":
        assert len(written) == 2 and max(written) < 1.2 * min(written)


class Odd(nn.Module):
    """Tensors that cannot be cut like others: without dims, with one row, without elements; buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.randn(()))
        self.row = nn.Parameter(torch.randn(1, 3))
        self.register_buffer("count", torch.randint(1000, ()))
        self.register_buffer("table", torch.randn(3, 3).bfloat16())
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("passing", torch.randn(3), persistent=False)

    def forward(self, x):
        return ((self.linear(x) * self.scale + self.row) @ self.table.float()).pow(2).mean()


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_odd_tensors(accelerator, tmp_path, plan):
    accelerator(plan)

    def steps(model, optimizer, count):
        for _ in range(count):
            model(torch.linspace(-1, 1, 32).reshape(4, 8).to(model.scale.device)).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = Odd().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(model, optimizer, 2)
    moreh_ap.save(tmp_path, model=model, optimizer=optimizer)
    steps(model, optimizer, 2)
    for device in ("cpu", "cuda"):
        fresh = Odd().to(device)
        row = fresh.table.detach()[1]  # looks at the memory that is loaded into
        fresh_optimizer = torch.optim.AdamW(fresh.parameters())
        kept = fresh.passing.cpu().clone()
        moreh_ap.load(tmp_path, model=fresh, optimizer=fresh_optimizer)
        steps(fresh, fresh_optimizer, 2)
        torch.testing.assert_close(weights(fresh), weights(model), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(row.cpu(), model.table[1].cpu())
        assert torch.equal(fresh.passing.cpu(), kept)


class Wide(nn.Module):
    """64 MB of parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4096, 4096, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean()


def resident_bytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@contextlib.contextmanager
def grows_by_less_than(num_bytes):
    """Fails if the resident memory of this process was ever so much larger inside than before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; Source: proc(5), clear_refs
    before = resident_bytes("VmRSS")
    yield
    assert resident_bytes("VmHWM") - before < num_bytes


def test_the_model_does_not_pass_through_the_controller(accelerator, tmp_path):
    accelerator("shard=2")

    def run():
        model = Wide().cuda()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model, optimizer):
        loss = model(torch.ones(2, 4096).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer = run()
    step(model, optimizer)
    with grows_by_less_than(24e6):  # of 128 MB
        moreh_ap.save(tmp_path, model=model, optimizer=optimizer)
    expected = step(model, optimizer)
    with grows_by_less_than(24e6):
        moreh_ap.load(tmp_path, model=model, optimizer=optimizer)
        assert step(model, optimizer) == pytest.approx(expected, rel=1e-6)
    fresh, fresh_optimizer = run()
    with grows_by_less_than(24e6):  # the workers read the files at the first call and the first step
        moreh_ap.load(tmp_path, model=fresh, optimizer=fresh_optimizer)
        assert step(fresh, fresh_optimizer) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "tensor=2"])
def test_a_save_in_the_background_has_the_state_at_its_call(accelerator, tmp_path, plan):
    accelerator(plan)
    run = Run("cuda", seed=0)
    run.train(2)
    passing = torch.ones(3)
    saving = moreh_ap.save(
        tmp_path / "background",
        model=run.model,
        optimizer=run.optimizer,
        extra={"step": run.step, "schedule": run.schedule.state_dict(), "passing": passing},
        background=True,
    )
    passing.zero_()
    expected = run.train(3)  # without waiting
    saving.result()
    assert saving.done()
    fresh = Run("cuda", seed=1).load(tmp_path / "background")
    assert torch.equal(moreh_ap.load(tmp_path / "background")["passing"], torch.ones(3))
    assert fresh.train(3) == expected, "the same bits"
    names = {path.name for path in (tmp_path / "background").iterdir()}
    assert not [name for name in names if "written" in name]


def test_a_save_in_the_background_that_fails_is_told_at_the_next(accelerator, tmp_path):
    session = accelerator("shard=2")
    run = Run("cuda", seed=0)
    run.train(1)
    run.save(tmp_path)
    (pid, *_) = session.workers.pids
    for tell in ("result", "save", "load"):
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        saving = moreh_ap.save(tmp_path, model=run.model, optimizer=run.optimizer, background=True)
        assert isinstance(saving.exception(60), OSError)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        run.train(1)
        with pytest.raises(OSError, match=r"-worker0\.safetensors: OSError: .*File too large"):
            {"result": saving.result, "save": lambda: run.save(tmp_path), "load": lambda: run.load(tmp_path)}[tell]()
        if tell == "result":
            run.save(tmp_path)  # it was told
    assert run.load(tmp_path).step == 2
    assert not list(tmp_path.glob("*written*"))
