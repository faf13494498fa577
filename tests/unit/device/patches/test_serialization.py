"""Where tensors come back to from a file: `torch.save` and `torch.load` while "cuda" is the accelerator."""

from __future__ import annotations

import io

import pytest
import torch

from moreh_ap.device.patches import serialization
from moreh_ap.patching import Patches


@pytest.fixture(autouse=True)
def patches():
    patches = Patches()
    serialization.install(patches)
    yield patches
    patches.undo()


def saved(value, **how):
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    buffer.seek(0)
    return buffer


def by_a_gpu(value, monkeypatch, **how):
    with monkeypatch.context() as context:
        context.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        return saved(value, **how)


def test_each_tensor_comes_back_to_where_it_was():
    here = torch.arange(4.0)
    there = torch.arange(6.0).reshape(2, 3).cuda()
    value = {"here": here, "there": there, "none": torch.empty(0).cuda(), "view": here[1:], "last": there.mean()}
    loaded = torch.load(saved(value))
    assert {name: tensor.device.type for name, tensor in loaded.items()} == {
        "here": "cpu",
        "there": "cuda",
        "none": "cuda",
        "view": "cpu",
        "last": "cuda",
    }
    assert torch.equal(loaded["there"].cpu(), there.cpu()) and loaded["last"].item() == there.mean().item()
    assert loaded["view"].untyped_storage().data_ptr() == loaded["here"].untyped_storage().data_ptr()


def test_modules_come_back_with_their_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).cuda()
    loaded = torch.load(saved(model), weights_only=False)
    assert all(tensor.is_cuda for tensor in loaded.state_dict().values())
    assert isinstance(loaded[0].weight, torch.nn.Parameter) and loaded[0].weight.requires_grad
    assert torch.equal(loaded[0].weight.cpu(), model[0].weight.cpu())
    assert torch.load(saved(model.state_dict()))._metadata == model.state_dict()._metadata


def test_a_file_loads_without_us(patches):
    buffer = saved({"there": torch.ones(2).cuda()})
    patches.undo()
    loaded = torch.load(buffer)["there"]
    assert type(loaded) is torch.Tensor and loaded.tolist() == [1, 1]


@pytest.mark.parametrize(
    "map_location",
    ["cuda", torch.device("cuda"), {"cpu": "cuda:0"}, lambda storage, _: storage.cuda(0)],
)
def test_the_script_says_where_to(map_location):
    loaded = torch.load(saved(torch.ones(2)), map_location=map_location)
    assert loaded.is_cuda and loaded.tolist() == [1, 1]


@pytest.mark.parametrize("map_location", ["cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, _: storage])
def test_what_was_on_the_accelerator_can_stay_here(map_location):
    loaded = torch.load(saved(torch.ones(2).cuda()), map_location=map_location)
    assert type(loaded) is torch.Tensor and loaded.tolist() == [1, 1]


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_file_that_a_gpu_wrote(monkeypatch, zipped, weights_only):
    value = torch.arange(3.0)
    buffer = by_a_gpu({"value": value, "tail": value[1:]}, monkeypatch, _use_new_zipfile_serialization=zipped)
    loaded = torch.load(buffer, weights_only=weights_only)
    assert loaded["value"].is_cuda and loaded["value"].tolist() == [0, 1, 2] and loaded["tail"].tolist() == [1, 2]
    buffer.seek(0)
    assert torch.load(buffer, map_location="cpu", weights_only=weights_only)["value"].device.type == "cpu"


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.load(saved(torch.ones(2)), map_location="cuda:1")
