"""Gathered parameters are the objects that a module had."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from moreh_ap.parallelizer.state.parameter_identity import keep, originals


class Managed:
    """As much of `FSDPParam` as is asked for."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module_info = SimpleNamespace(module=module, param_name=name)
        self.device = torch.device("cpu")

    def init_unsharded_param(self) -> None:
        if not hasattr(self, "_unsharded_param"):
            self._unsharded_param = nn.Parameter(torch.full((2, 2), 7.0))


def gathered_twice(module: nn.Module) -> Any:
    found, managed = originals(module), Managed(module, "weight")
    keep(found, [managed])
    reference = weakref.ref(module.weight)  # as what notices changes has
    assert module.weight.shape == (2, 2) and reference() is module.weight
    managed.init_unsharded_param()
    managed.init_unsharded_param()
    assert "init_unsharded_param" not in vars(managed)
    return managed._unsharded_param


def test_what_is_gathered_is_the_parameter_that_others_hold_too():
    module = nn.Linear(2, 2, device="meta")
    module.aside = {"prior": [SimpleNamespace(mu=module.weight)]}
    held = module.weight
    assert gathered_twice(module) is held
    assert held.device.type == "cpu" and torch.equal(held.detach(), torch.full((2, 2), 7.0))


def test_a_parameter_with_weak_references_is_left_alone():
    module = nn.Linear(2, 2, device="meta")
    module.aside = [module.weight]
    reference = weakref.ref(module.weight)
    assert gathered_twice(module) is not reference()
    assert module.weight.device.type == "meta"


def test_parameters_that_modules_alone_hold_are_left_to_fsdp():
    inner = nn.Linear(2, 2, device="meta")
    module = nn.Sequential(inner, nn.LayerNorm(2))
    module.config, module.listed, module.again = SimpleNamespace(parent=module), [inner], inner
    module.config.itself = module.config
    assert originals(module) == {}
    module.config.bias = inner.bias
    assert originals(module) == {(id(inner), "bias"): inner.bias}
