"""A script's first call on devices that are not there: what is planned, and that weights take no memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from moreh_ap import device
from moreh_ap.accelerator.enabling import enable
from moreh_ap.dry import dry_accelerator
from moreh_ap.errors import OptionError, UnsupportedError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.session.planning import first_call
from moreh_ap.settings import Options

CLUSTER = find_cluster("8xH100-80GB")


class Left(BaseException):
    pass


def first_of(use, options=None, cluster=CLUSTER, with_weights=False):
    """Returns the first call of a model in `use`, and its plan."""
    found = []

    def watch(root, call):
        first = dry_accelerator.note_first_call(root, call)
        found.append((first, dry_accelerator.plan_of(first)))
        raise Left

    try:
        with dry_accelerator.dry(cluster, print, with_weights=with_weights), first_call.watching(watch):
            enable(options or Options())
            use()
    except Left:
        return found[0]
    finally:
        device.disable()
    raise AssertionError("no model was called")


def wide(width=2**15, layers=4):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def test_a_model_that_no_memory_would_hold_is_planned():
    def use():
        model = wide().cuda()  # 16 GiB
        torch.optim.AdamW(model.parameters())
        total = torch.cuda.get_device_properties(0).total_memory
        assert total == 8 * int(CLUSTER.device.memory_bytes)
        model(torch.ones(64, 2**15).cuda())

    first, plan = first_of(use)
    assert plan.choice.plan.num_devices == 8 and plan.choice.plan.shard == 8
    assert first.trains and not first.own_process and plan.notes == ()
    assert first.question.profile.parameters == pytest.approx(4 * 2**30, rel=1e-3)


def test_shared_weights_stay_shared_and_loaded_ones_stay_shapes():
    def use():
        model = wide(64, 2)
        model[1].weight = model[0].weight
        assert model[0].weight is model[1].weight and model[0].weight.device.type == "cpu"
        model.load_state_dict(model.state_dict())
        model.half().cuda()
        assert model[0].weight is model[1].weight and model[0].weight.is_cuda
        model(torch.ones(2, 64).cuda())

    first, plan = first_of(use)
    assert first.question.profile.parameters == 64 * 64 + 2 * 64
    assert "runs in this process" in plan.notes[0]


def test_with_weights_a_script_may_compute_with_them():
    def use():
        model = wide(64, 2)
        assert torch.isfinite(model(torch.ones(1, 64))).all()
        model.cuda()(torch.ones(2, 64).cuda())

    first_of(use, with_weights=True)
    with pytest.raises(UnsupportedError, match="value of a weight"):
        first_of(use)


def test_the_scripts_own_plan_and_number_of_devices_count():
    def use():
        wide(2**12).cuda()(torch.ones(64, 2**12).cuda())

    given = Plan.parse("shard=2,precision=bf16")
    _, plan = first_of(use, Options(plan=given, devices=2))
    assert plan.choice.plan == given and any("gives the plan" in note for note in plan.notes)
    with pytest.raises(OptionError, match="asks for 16 devices, and 8 were named"):
        first_of(use, Options(devices=16))


def test_a_call_without_gradients_is_said():
    def use():
        with torch.no_grad():
            wide(2**12).cuda()(torch.ones(64, 2**12).cuda())

    first, plan = first_of(use)
    assert not first.trains and any("asks for no gradients" in note for note in plan.notes)


def test_nothing_stays_changed():
    before = nn.Module.register_parameter
    first_of(lambda: wide(8, 1).cuda()(torch.ones(2, 8).cuda()))
    gc.collect()
    assert nn.Module.register_parameter is before and type(nn.Linear(2, 2).weight) is nn.Parameter
    assert device.current() is None
