"""The folder of a training checkpoint, without workers: what comes back, what is refused, what interruptions leave."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import re
import signal
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_runs import files, weights
from one_line_models import OwnTransformer
from torch import nn
from user_script import SCRIPTS, UserScript

import moreh_ap
from moreh_ap.errors import LoadError, OptionError, UnsupportedError
from moreh_ap.session.checkpoint.folder_lock import FolderLock

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


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
    with pytest.raises(UnsupportedError, match=r"extra/wide has the dtype torch\.complex128"):
        moreh_ap.save(tmp_path, model=model, extra={"wide": torch.zeros(2, dtype=torch.complex128)})
    assert moreh_ap.load(tmp_path)["counts"] == extra["counts"]


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
    with pytest.raises(LoadError, match="holds no 'model' among its models") as refused:
        moreh_ap.load(tmp_path, model=first)
    assert refused.value.fix == f'moreh_ap.load("{tmp_path}", model={{"first": first, "second": second}})'
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
        with pytest.raises(LoadError, match=text) as refused:
            moreh_ap.load(tmp_path, model=other)
        assert refused.value.fix, "each says what to do"
        if not other[0].weight.is_meta:
            torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(
        LoadError, match=r"group 0 of optimizer has other parameters than in .*: model/1\.weight"
    ) as other:
        moreh_ap.load(tmp_path, model=fresh, optimizer=torch.optim.SGD([*fresh[0].parameters(), fresh[1].bias]))
    assert "without the optimizer" in other.value.fix
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


@pytest.mark.rotating  # one more damage each
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


@pytest.mark.rotating  # one more damage each
@pytest.mark.parametrize(
    "damage",
    [damage_flip, damage_cut, damage_remove, damage_number, damage_json, damage_pieces],
    ids=lambda d: d.__name__,
)
def test_the_checkpoint_before_a_damaged_one_is_loaded(tmp_path, damage):
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    moreh_ap.save(tmp_path, model=model, optimizer=optimizer, extra={"step": 1}, keep=1)
    earlier = {file: file.read_bytes() for file in files(tmp_path)}
    expected = weights(model)
    with torch.no_grad():
        model.weight.add_(1)
    moreh_ap.save(tmp_path, model=model, optimizer=optimizer, extra={"step": 2})
    for file in earlier:
        file.rename(tmp_path / "aside")
    name, problem = damage(tmp_path)
    for file in earlier:
        (tmp_path / "aside").rename(file)
    with pytest.warns(UserWarning, match=rf"{name} is damaged: .*({problem}).*checkpoint before it is loaded, saved 2"):
        assert moreh_ap.load(tmp_path, model=model, optimizer=optimizer) == {"step": 1}
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=0)
    moreh_ap.save(tmp_path, model=model, optimizer=optimizer, extra={"step": 3})
    moreh_ap.save(tmp_path, model=model, optimizer=optimizer, extra={"step": 4})
    assert moreh_ap.load(tmp_path) == {"step": 4}
    assert len(files(tmp_path)) == len(list(tmp_path.glob("checkpoint*.json"))) == 2, "the damaged one is gone"


def test_as_many_checkpoints_stay_as_are_asked_for(tmp_path):
    model = nn.Linear(3, 4)
    for step in range(5):
        moreh_ap.save(tmp_path, model=model, extra={"step": step}, keep=3)
    assert len(files(tmp_path)) == 3
    for newest in (4, 3, 2):
        assert moreh_ap.load(tmp_path) == {"step": newest}
        max(tmp_path.glob("checkpoint*.json"), key=lambda path: path.name.replace(".json", "~")).unlink()
    with pytest.raises(LoadError, match="holds no checkpoint"):
        moreh_ap.load(tmp_path)
    with pytest.raises(OptionError, match="keep=0"):
        moreh_ap.save(tmp_path, model=model, keep=0)


TWO_RUNS = """
import os, random, sys, time, torch, moreh_ap
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
folder, number = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(64, 64)
for step in range(50):
    torch.nn.init.constant_(model.weight, number)
    moreh_ap.save(folder, model=model, extra={"run": number})
    time.sleep(random.uniform(0, 0.1))
"""


@pytest.mark.rotating  # one more damage each
def test_two_runs_in_one_folder_are_told_and_damage_nothing(tmp_path):
    with (
        UserScript("-c", TWO_RUNS, tmp_path / "saved", 1, cwd=tmp_path) as first,
        UserScript("-c", TWO_RUNS, tmp_path / "saved", 2, cwd=tmp_path) as second,
    ):
        loaded = 0
        first.wait_for_output("ready")
        second.wait_for_output("ready")
        (tmp_path / "go").touch()
        while first.process.poll() is None or second.process.poll() is None:
            if (tmp_path / "saved" / "checkpoint.json").exists():
                loaded += _load_one_of_two(tmp_path / "saved")
        first.succeed()
        second.succeed()
    assert loaded
    assert _load_one_of_two(tmp_path / "saved")
    assert all("Another run saves into" in script.err for script in (first, second)), first.err + second.err


def _load_one_of_two(folder):
    """Loads what is there now: a save may replace it while it is read, but never mixes two."""
    model = nn.Linear(64, 64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = moreh_ap.load(folder, model=model)["run"]
    except (LoadError, FileNotFoundError):
        return 0  # removed meanwhile
    assert torch.equal(model.weight, torch.full((64, 64), float(run)))
    return 1


def test_a_save_waits_for_that_of_another_process(tmp_path):
    moreh_ap.save(tmp_path, model=nn.Linear(1, 1))
    hold = "import sys, time; from moreh_ap.session.checkpoint.folder_lock import FolderLock as L\n"
    hold += "held = L(sys.argv[1]); print('held', flush=True); time.sleep(600)"
    with UserScript("-c", hold, tmp_path, cwd=tmp_path) as script:
        script.wait_for_output("held")
        with pytest.raises(TimeoutError, match=rf"process {script.process.pid} on \S+ has been saving .* for 0 s"):
            FolderLock(str(tmp_path), waits_s=0.1)
        script.process.kill()
        script.wait()
        moreh_ap.save(tmp_path, model=nn.Linear(1, 1))


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
    assert len(list((tmp_path / "saved").glob("*.safetensors*"))) == 2, "the save had begun"
    fresh = nn.Linear(3, 4)
    assert moreh_ap.load(tmp_path / "saved", model=fresh) == {"step": 7}
    assert torch.equal(fresh.weight, model.weight)
    moreh_ap.save(tmp_path / "saved", model=model, extra={"step": 8})
    names = {path.name for path in (tmp_path / "saved").iterdir()} - {path.name for path in files(tmp_path / "saved")}
    assert names == {"checkpoint.json", "checkpoint-000001.json", "checkpoint.lock"}
    assert len(files(tmp_path / "saved")) == 2, "what the killed save left is gone"
    assert moreh_ap.load(tmp_path / "saved") == {"step": 8}


def test_the_example_of_the_page_goes_on(tmp_path, monkeypatch):
    code, resuming = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    epochs = []

    def train_one_epoch(model, optimizer, scheduler):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        epochs.append(scheduler.last_epoch)
        if len(epochs) == 2:
            raise KeyboardInterrupt

    for _ in range(2):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        names = {"model": model, "optimizer": optimizer, "train_one_epoch": train_one_epoch}
        names["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with contextlib.suppress(KeyboardInterrupt):
            exec(code, names)
    assert epochs == [1, 2, 2, 3]
    assert resuming in (SCRIPTS / "saves_itself.py").read_text(encoding="utf-8")
    assert {entry["step"].item() for entry in optimizer.state.values()} == {3}
