"""Which commands make what a snapshot does not have."""

from __future__ import annotations

from dataclasses import replace

from moreh_ap.protocol.messages.lasting_commands import Structure
from moreh_ap.protocol.messages.models import BuildModel, ChangeModule, ReleaseModel, SetRequiresGrad
from moreh_ap.protocol.messages.optimizers import BuildOptimizer, ReleaseOptimizer, StepOptimizer
from moreh_ap.protocol.messages.stream import DefineList, ImportModules, Synchronize
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.protocol.tensor_source import TensorSource

BUILD = BuildModel("model0", b"", "shard=2", {})
OPTIMIZER = BuildOptimizer("optimizer1", b"", ((StateRef("model0", "param", "weight"),),), {})


def after(*commands):
    structure = Structure()
    structure.add(commands)
    return structure.commands()


def test_what_computes_is_left_out():
    imports, step = ImportModules(("numpy",)), StepOptimizer("optimizer1", {})
    assert after(imports, BUILD, OPTIMIZER, DefineList(3, ()), step, Synchronize()) == (imports, BUILD, OPTIMIZER)


def test_a_model_is_made_without_the_values_that_a_copy_has():
    (made,) = after(replace(BUILD, sources={"weight": (TensorSource("file", "weight"),)}))
    assert made == replace(BUILD, sources={"weight": ()})


def test_only_the_last_value_of_an_attribute_or_flag_is_set():
    first = ChangeModule("model0", (("", "step", b"1"), ("head", "scale", b"2")))
    second, other = ChangeModule("model0", (("", "step", b"3"),)), ChangeModule("model9", (("", "step", b"4"),))
    frozen = SetRequiresGrad("model0", {"weight": False, "bias": False}), SetRequiresGrad("model0", {"bias": True})
    assert after(BUILD, first, other, *frozen, second) == (
        BUILD,
        ChangeModule("model0", (("head", "scale", b"2"),)),
        other,
        SetRequiresGrad("model0", {"weight": False, "bias": True}),
        second,
    )


def test_a_model_that_was_dropped_is_made_while_an_optimizer_has_its_parameters():
    assert after(BUILD, ReleaseModel("model0")) == ()
    assert after(BUILD, OPTIMIZER, ReleaseModel("model0")) == (BUILD, OPTIMIZER, ReleaseModel("model0"))
    assert after(BUILD, OPTIMIZER, ReleaseModel("model0"), ReleaseOptimizer("optimizer1")) == ()
    assert after(BUILD, OPTIMIZER, ReleaseOptimizer("optimizer1")) == (BUILD,)
