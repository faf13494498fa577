"""`moreh-ap verify`, and the verification at a model's first use: what is verified, found, and left alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from user_script import SCRIPTS, UserScript

from moreh_ap import device
from moreh_ap.cli.main import main
from moreh_ap.errors import PlanError
from moreh_ap.local import cache_files
from moreh_ap.session.session import Session

pytestmark = pytest.mark.rotating  # one more model each

IS_TRIED = "is not verified for"


class Block(nn.Module):
    """A block of one gated product."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two linear layers; its loss is the mean of the squares of what comes out.

    Args:
        error: On a worker, the loss is so much larger: what a wrong scaling does.
    """

    def __init__(self, error: float = 0.0) -> None:
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.out = nn.Linear(16, 8)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        loss = self.out(x).square().mean()
        return loss * (1 + self.error) if "MOREH_AP_WORKER" in os.environ else loss


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own for what was verified."""
    monkeypatch.setenv(cache_files.FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", autouse=True)
def no_accelerator_after() -> Iterator[None]:
    yield
    device.disable()


def first_step(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Loss and gradient of `model` for five rows."""
    x = torch.linspace(-1, 1, 40).view(5, 8)
    loss = model(x.to(next(model.parameters()).device))
    loss.backward()
    gradient = model.out.weight.grad
    assert gradient is not None
    return loss.detach().cpu(), gradient.cpu()


def test_an_unknown_model_is_verified_once_and_nothing_of_it_is_touched(
    accelerator: Callable[..., Session], capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    session = accelerator("pipeline=2,micro_batches=2")
    torch.manual_seed(3)
    plain = Stack()
    expected = first_step(plain)
    for is_first in (True, False):
        stream, seeds = torch.get_rng_state(), vars(session.generator).copy()
        model = Stack().cuda()
        model.load_state_dict(plain.state_dict())
        stream = torch.get_rng_state()
        got = first_step(model)
        said = capsys.readouterr().out
        assert (IS_TRIED in said) is is_first
        assert said.count('[info] plan="') == 1 + is_first, "the plan once, and the verification's own line"
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
        assert torch.equal(stream, torch.get_rng_state())
        assert vars(session.generator) == {**seeds, "_offset": seeds["_offset"] + 1}
        current = device.current()
        assert current is not None
        roots = [remote.root for remote in current.models._models]  # models of other tests, too
        assert [root for root in roots if type(root) is type(model)] == [model], "the copy has left"
        model.cpu()
    (entry,) = json.loads((cache / "verified.json").read_text()).values()
    assert entry["model"] == "Stack"
    assert entry["verdict"] == "verified"
    assert entry["loss"] <= 1e-5


def test_a_wrong_scaling_is_found_and_the_plan_refused(
    accelerator: Callable[..., Session], capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    accelerator("pipeline=2,micro_batches=2")
    cache.mkdir()
    (cache / "verified.json").write_text("{ broken")
    model = Stack(error=1e-3).cuda()
    for is_first in (True, False):
        with pytest.raises(PlanError, match=r"failed for Stack: a loss differs by 1.0e-03") as caught:
            first_step(model)
        assert 'plan="shard=2"' in str(caught.value)
        assert (IS_TRIED in capsys.readouterr().out) is is_first, "what was found wrong is remembered too"
    (entry,) = json.loads((cache / "verified.json").read_text()).values()
    assert entry["verdict"] == "wrong"
    with torch.no_grad():
        assert torch.isfinite(model.cpu()(torch.ones(2, 8))), "the model is where it was"


def test_plans_that_need_no_verification_get_none(
    accelerator: Callable[..., Session], capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator("shard=2")
    first_step(Stack().cuda())
    assert IS_TRIED not in capsys.readouterr().out


def test_a_script_sees_nothing_of_it(tmp_path: Path) -> None:
    device.disable()
    with UserScript(
        "train_own_blocks.py", "pipeline=2,micro_batches=2", cwd=tmp_path, MOREH_AP_CACHE=str(tmp_path)
    ) as script:
        lines = script.succeed().splitlines()
    assert any(IS_TRIED in line for line in lines)
    assert "undisturbed True True" in lines
    assert len([line for line in lines if line.startswith("loss")]) == 2


def test_the_command_shows_a_table_and_says_no_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "found.json"
    assert main(["verify", "t5", "--plans", "shard=2", "pipeline=2,micro_batches=2", "--json", str(file)]) == 1
    said = capsys.readouterr().out
    shard, pipeline = json.loads(file.read_text())
    assert (shard["plan"], shard["verdict"], shard["reason"]) == ("shard=2", "verified", "")
    assert shard["gradient"] < 1e-4 and shard["gradient_name"] in said
    assert (pipeline["plan"], pipeline["verdict"]) == ("pipeline=2,micro_batches=2", "refused")
    assert pipeline["gradient"] is None and pipeline["reason"] in said
    assert device.current() is None


def test_the_command_takes_model_and_batch_from_a_script(tmp_path: Path) -> None:
    device.disable()
    call = ("verify", SCRIPTS / "train_own_blocks.py", "--plans", "replicate=2", "--", "shard=2")
    with UserScript("-m", "moreh_ap.cli.main", *call, cwd=tmp_path) as command:
        said = command.succeed()
    assert "replicate=2 │ verified" in said
    assert "undisturbed" not in said, "the script was left at its first call"
