"""Training checkpoints: saved under one plan, loaded under another, and the losses go on as if nothing had happened.

They are compared with one process without the one line. What is loaded into starts from another seed, so that every
number has to come from the checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import signal
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from one_line_models import OwnTransformer, ragged_batches, tiny_gpt2, tiny_llama
from torch import Tensor, nn
from user_script import UserScript

import moreh_ap
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import LoadError, UnsupportedError
from moreh_ap.session.state import OnWorkers

ROWS = 4
FOUR_TWO_ONE = ["replicate=2,shard=2", "replicate=2", "tensor=2", "shard=2", "replicate=1", "pipeline=2"]


class Sign(torch.optim.Optimizer):
    """An optimizer of the user's own, whose steps workers do not take: momentum of signs."""

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


class Run:
    """A model with its optimizer and schedule, trained on fixed batches."""

    def __init__(self, device, seed, make=tiny_llama, optimizer=torch.optim.AdamW, **settings):
        torch.manual_seed(seed)
        self.device = device
        self.model = make().to(device)
        settings = {"lr": 1e-2, "eps": 1e-6} if optimizer is torch.optim.AdamW else {"lr": 1e-2, **settings}
        self.optimizer = optimizer(self.model.parameters(), **settings)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.step = 0

    def train(self, steps):
        losses = []
        for batch in ragged_batches(20, ROWS)[self.step : self.step + steps]:
            batch = {key: value.to(self.device) for key, value in batch.items()}
            loss = self.model(**batch, use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        self.step += steps
        return [loss.item() for loss in losses]

    def save(self, folder):
        extra = {"step": self.step, "schedule": self.schedule.state_dict()}
        moreh_ap.save(folder, model=self.model, optimizer=self.optimizer, extra=extra)

    def load(self, folder, **options):
        extra = moreh_ap.load(folder, model=self.model, optimizer=self.optimizer, **options)
        self.step = extra["step"]
        self.schedule.load_state_dict(extra["schedule"])
        return self


@pytest.fixture(scope="module")
def uninterrupted():
    """Losses of one process."""
    return Run("cpu", 0).train(5 + 2 * len(FOUR_TWO_ONE))


def weights(model):
    return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}


def files(folder, kind="*"):
    return sorted(Path(folder).glob(f"*-{kind}.safetensors"))


# -- without workers -------------------------------------------------------------------------------------------------


def test_extra_comes_back_as_it_was(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    extra = {
        "schedules": [steps.state_dict(), plateau.state_dict()],
        "random": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()},
        "counts": Counter({2: 1}),
        "kinds": (1, 2.5, "text", None, True, [-math.inf], {3: "three"}),
        "tensors": [torch.tensor(0.1, dtype=torch.bfloat16), torch.zeros(0, 3), torch.arange(6).reshape(2, 3).T],
    }
    moreh_ap.save(tmp_path, model=model, extra=extra)
    got = moreh_ap.load(tmp_path)
    torch.testing.assert_close(got["random"]["torch"], extra["random"]["torch"], rtol=0, atol=0)
    torch.testing.assert_close(got["tensors"], extra["tensors"], rtol=0, atol=0)
    random.setstate(got["random"]["python"])
    np.random.set_state(got["random"]["numpy"])
    for key in ("schedules", "counts", "kinds"):
        assert got[key] == extra[key] and type(got[key]) is type(extra[key])
    json.loads((tmp_path / "checkpoint.json").read_text(), parse_constant=pytest.fail)
    with pytest.raises(UnsupportedError, match="extra/odd/0 is a set"):
        moreh_ap.save(tmp_path, model=model, extra={"odd": [{1}]})


def test_several_models_and_optimizers(tmp_path):
    first, second = OwnTransformer(), nn.BatchNorm1d(3)
    optimizers = {name: torch.optim.Adam(m.parameters()) for name, m in {"a": first, "b": second}.items()}
    second(torch.randn(4, 3)).sum().backward()
    optimizers["b"].step()
    moreh_ap.save(tmp_path, model={"first": first, "second": second}, optimizer=optimizers)
    fresh = {"first": OwnTransformer(), "second": nn.BatchNorm1d(3)}
    others = {"b": torch.optim.Adam(fresh["second"].parameters(), lr=5.0)}
    moreh_ap.load(tmp_path, model=fresh, optimizer=others)
    torch.testing.assert_close(weights(fresh["first"]), weights(first), rtol=0, atol=0)
    torch.testing.assert_close(weights(fresh["second"]), weights(second), rtol=0, atol=0)
    assert fresh["first"].head.weight is fresh["first"].embedding.weight
    assert others["b"].param_groups[0]["lr"] == 1e-3
    torch.testing.assert_close(others["b"].state_dict(), optimizers["b"].state_dict(), rtol=0, atol=0)
    with pytest.raises(LoadError, match="holds no 'model' among its models"):
        moreh_ap.load(tmp_path, model=first)
    with pytest.raises(UnsupportedError, match=r"shape \(96, 32\) that is in no model that was given"):
        moreh_ap.save(tmp_path, model=second, optimizer=optimizers["a"])


def test_what_does_not_match_is_named_and_nothing_is_changed(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moreh_ap.save(tmp_path, model=model, optimizer=optimizer)
    for other, text in [
        (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)), "the model lacks model/1.bias"),
        (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(1, 1)), "lacks model/2.bias, model/2.weight"),
        (
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)),
            r"model/1.weight has shape \(5, 4\) in the model and \(2, 4\)",
        ),
        (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to("meta"), "model/0.weight is on meta"),
    ]:
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(LoadError, match=text):
            moreh_ap.load(tmp_path, model=other)
        if not other[0].weight.is_meta:
            torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(LoadError, match=r"group 0 of optimizer has other parameters than in .*: model/1\.weight"):
        moreh_ap.load(tmp_path, model=fresh, optimizer=torch.optim.SGD([*fresh[0].parameters(), fresh[1].bias]))
    torch.testing.assert_close(fresh.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(LoadError, match="holds no checkpoint"):
        moreh_ap.load(tmp_path / "elsewhere", model=fresh)


def damage_flip(folder):
    (file,) = files(folder)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file.name, "the checksum differs"


def damage_cut(folder):
    (file,) = files(folder)
    file.write_bytes(file.read_bytes()[:-1])
    return file.name, r"it has \d+ bytes, \d+ were written"


def damage_remove(folder):
    (file,) = files(folder)
    file.unlink()
    return file.name, "it cannot be read"


def damage_number(folder):
    file = folder / "checkpoint.json"
    file.write_text(file.read_text().replace('"lr": 0.25', '"lr": 0.75'))
    return file.name, "the checksum differs"


def damage_json(folder):
    file = folder / "checkpoint.json"
    file.write_text(file.read_text()[:-3])
    return file.name, "it is no JSON"


def damage_pieces(folder):
    file = folder / "checkpoint.json"
    content = json.loads(file.read_text())
    content["tensors"]["model/weight"]["pieces"] = []
    file.write_text(json.dumps(content))
    return file.name, "the pieces of model/weight are not the whole tensor|the checksum differs"


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "damage",
    [damage_flip, damage_cut, damage_remove, damage_number, damage_json, damage_pieces],
    ids=lambda d: d.__name__,
)
def test_damage_is_found(tmp_path, damage, verify):
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    moreh_ap.save(tmp_path, model=model, optimizer=optimizer)
    name, problem = damage(tmp_path)
    if not verify and damage in (damage_flip, damage_number):  # sizes alone do not tell
        moreh_ap.load(tmp_path, model=model, optimizer=optimizer, verify=False)
        return
    with pytest.raises(LoadError, match=rf"{name} is damaged: .*({problem})"):
        moreh_ap.load(tmp_path, model=model, optimizer=optimizer, verify=verify)


def test_a_later_format_is_refused(tmp_path):
    moreh_ap.save(tmp_path, model=nn.Linear(1, 1))
    file = tmp_path / "checkpoint.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(LoadError, match="has version 2 of the format"):
        moreh_ap.load(tmp_path)


KILLED = """
import os, signal, sys, torch, moreh_ap
folder, point = sys.argv[1:]
model = torch.nn.Linear(3, 4)
extra = moreh_ap.load(folder, model=model)
with torch.no_grad():
    model.weight.add_(1)
real = getattr(os, point)
def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, point, kill)
moreh_ap.save(folder, model=model, extra={"step": extra["step"] + 1})
"""


@pytest.mark.parametrize("point", ["fsync", "replace"])
def test_a_killed_save_leaves_the_earlier_checkpoint(tmp_path, point):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    moreh_ap.save(tmp_path / "saved", model=model, extra={"step": 7})
    with UserScript("-c", KILLED, tmp_path / "saved", point, cwd=tmp_path) as script:
        assert script.wait(timeout_s=120) == -signal.SIGKILL, script.err
    assert len(files(tmp_path / "saved")) == 2, "the save had begun"
    fresh = nn.Linear(3, 4)
    assert moreh_ap.load(tmp_path / "saved", model=fresh) == {"step": 7}
    assert torch.equal(fresh.weight, model.weight)
    moreh_ap.save(tmp_path / "saved", model=model, extra={"step": 8})
    assert len(list((tmp_path / "saved").iterdir())) == 2, "what the killed save left is gone"
    assert moreh_ap.load(tmp_path / "saved") == {"step": 8}


# -- under plans -----------------------------------------------------------------------------------------------------


def test_every_plan_goes_on_where_another_stopped(accelerator, tmp_path, uninterrupted):
    """On 4, 2, 1 and 2 workers, and after each plan a plain model in one process."""
    losses = []
    for leg, plan in enumerate(FOUR_TWO_ONE):
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
        assert len(files(tmp_path)) <= session.num_devices + 1
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
    "own": (Sign, {}),
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
    obstacle = tmp_path / "feedbeef-worker1.safetensors"
    obstacle.write_text("in the way of one worker alone")
    with pytest.raises(OSError, match=r"feedbeef-worker1\.safetensors: FileExistsError"):
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


class Wide(nn.Module):
    """128 MB of parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


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
    with grows_by_less_than(64e6):  # of 256 MB
        moreh_ap.save(tmp_path, model=model, optimizer=optimizer)
    expected = step(model, optimizer)
    with grows_by_less_than(64e6):
        moreh_ap.load(tmp_path, model=model, optimizer=optimizer)
        assert step(model, optimizer) == pytest.approx(expected, rel=1e-6)
    fresh, fresh_optimizer = run()
    moreh_ap.load(tmp_path, model=fresh, optimizer=fresh_optimizer)
    with grows_by_less_than(64e6):  # the workers read the files at the first call and the first step
        assert step(fresh, fresh_optimizer) == pytest.approx(expected, rel=1e-6)
