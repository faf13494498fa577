"""Parameters on meta get memory, and objects that hold them notice nothing."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from moreh_ap.parallelizer.state.loading import fill
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
