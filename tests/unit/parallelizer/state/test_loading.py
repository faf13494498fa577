"""Parameters on meta get memory, and objects that hold them notice nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from moreh_ap.parallelizer.apply import apply_plan
from moreh_ap.parallelizer.mesh import build_mesh
from moreh_ap.parallelizer.state.loading import fill
from moreh_ap.plan import Plan
from moreh_ap.protocol.tensor_source import TensorSource


class Variable:
    def __init__(self, value: nn.Parameter) -> None:
        self.value = value


class HoldsVariables(nn.Module):
    """Computes with parameters that objects hold, and looks after its buffer itself when it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))
        self.register_buffer("total", torch.empty(3, device="meta"))
        self.variable = Variable(self.weight)

    def _apply(self, fn: Any, recurse: bool = True) -> HoldsVariables:
        before = self._buffers["total"]
        super()._apply(fn, recurse)
        before.data = self._buffers["total"].data  # type: ignore[union-attr]
        self._buffers["total"] = before
        return self


def test_parameters_and_buffers_stay_the_same_objects(tmp_path: Any) -> None:
    model = HoldsVariables()
    weight, total = model.weight, model.total
    file = str(tmp_path / "values.safetensors")
    save_file({"weight": torch.arange(3.0), "total": torch.ones(3)}, file)
    fill(model, {name: TensorSource(file, name) for name in ("weight", "total")}, "cpu")
    assert model.weight is weight is model.variable.value and model.total is total
    assert weight.tolist() == [0.0, 1.0, 2.0] and total.tolist() == [1.0, 1.0, 1.0]
    assert weight.requires_grad and not total.requires_grad


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class MovesItsStrides(nn.Module):
    """Moves tensors of its own with the module, by an `_apply` that takes the function alone (YOLO of ultralytics)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.strides = torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def _apply(self, fn: Any) -> MovesItsStrides:  # type: ignore[override]
        super()._apply(fn)
        self.strides = fn(self.strides)
        return self


@pytest.mark.usefixtures("group")
def test_a_sharded_module_may_have_an_apply_of_its_own(tmp_path: Any) -> None:
    with torch.device("meta"):
        model = MovesItsStrides()
    plan = Plan.parse("offload=all")  # FSDP2 around one process
    apply_plan(model, plan, build_mesh(plan, "cpu"))
    file = str(tmp_path / "values.safetensors")
    save_file({"weight": torch.eye(2) * 3}, file)
    fill(model, {"layer.weight": TensorSource(file, "weight")}, "cpu")
    assert model(torch.ones(2)).tolist() == [3.0, 3.0]  # FSDP2 gathers what was read
