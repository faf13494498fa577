"""Weights come from files in slices, and every failure names its tensor."""

from __future__ import annotations

from pathlib import Path

import parallelizer_jobs as jobs
import pytest
import torch
from parallelizer_models import loss_of, make_batch, make_model
from parallelizer_team import Team
from safetensors.torch import save_file

pytestmark = pytest.mark.rotating  # one more family or plan each


def store(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    model = make_model(name)
    tensors = {f"stored.{key}": value.detach().to(dtype).clone() for key, value in model.named_parameters()}
    tensors.update({f"stored.{key}": value.clone() for key, value in model.named_buffers()})
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("plan", ["replicate=1", "replicate=2", "shard=2", "shard=3", "shard=4", "replicate=2,shard=2"])
@pytest.mark.parametrize("name", ["classifier", "gpt2", "llama"])
def test_every_worker_reads_its_rows(team: Team, tmp_path: Path, name: str, plan: str) -> None:
    file = store(tmp_path, name)
    model = make_model(name)
    loss = loss_of(model(**make_batch(name, 0))).item()
    for whole, tied, got_loss in team.run(
        jobs.Plan.parse(plan).num_devices, jobs.load, plan=plan, file=str(file), name=name, missing=None
    ):
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            torch.testing.assert_close(whole[key], value.detach(), rtol=0, atol=0)
        assert tied == (name == "gpt2")
        assert got_loss == pytest.approx(loss, rel=1e-6)


def test_values_take_the_dtype_of_the_module(team: Team, tmp_path: Path) -> None:
    file = store(tmp_path, "llama", torch.bfloat16)
    whole, _, _ = team.run(2, jobs.load, plan="shard=2", file=str(file), name="llama", missing=None)[0]
    for key, value in make_model("llama").named_parameters():
        assert torch.equal(whole[key], value.detach().bfloat16().float()), key


def test_a_missing_source_is_named(team: Team, tmp_path: Path) -> None:
    file = store(tmp_path, "llama")
    with pytest.raises(RuntimeError, match=r"no value for 1 of \d+ tensors: model\.norm\.weight"):
        team.run(2, jobs.load, plan="shard=2", file=str(file), name="llama", missing="model.norm.weight")


def test_another_shape_is_named(team: Team, tmp_path: Path) -> None:
    file = store(tmp_path, "classifier")
    tensors = {f"stored.{key}": value.detach().clone() for key, value in make_model("classifier").named_parameters()}
    tensors["stored.head.weight"] = torch.zeros(3, 4)
    save_file(tensors, file)
    with pytest.raises(RuntimeError, match=r"head\.weight: has shape \(7, 15\), .* has \(3, 4\)"):
        team.run(1, jobs.load, plan="replicate=1", file=str(file), name="classifier", missing=None)
