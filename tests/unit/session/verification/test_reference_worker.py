"""What the worker that computes alone is told, and which GPU it has."""

from __future__ import annotations

import pytest

from moreh_ap.plan import Plan
from moreh_ap.protocol.messages.calls import Forward, ReadOutputs
from moreh_ap.protocol.messages.checkpoints import WriteCheckpoint
from moreh_ap.protocol.messages.models import BuildModel, ReleaseModel
from moreh_ap.protocol.messages.state import ReadState
from moreh_ap.protocol.messages.stream import Synchronize
from moreh_ap.session.verification.reference_worker import form_for_one, visible_device


def test_a_model_is_built_under_the_plan_of_one_device():
    form = form_for_one(BuildModel("model0", b"", "pipeline=2,micro_batches=4", {}, None))
    assert Plan.parse(form.plan) == Plan(replicate=1)


def test_a_forward_counts_on_no_way_to_share_the_batch():
    forward = Forward(1, 2, (), None, (), True, 0, None, None, None, (), expected="split")
    assert form_for_one(forward).expected is None


@pytest.mark.parametrize("command", [ReadState(()), ReadOutputs(1, (0,)), Synchronize(), WriteCheckpoint("", {})])
def test_questions_are_for_the_others(command: object):
    assert form_for_one(command) is None


def test_what_changes_a_worker_is_passed_on():
    command = ReleaseModel("model0")
    assert form_for_one(command) is command


@pytest.mark.parametrize(
    ("num_workers", "num_gpus", "names", "device"),
    [(2, 4, "", "2"), (2, 2, "", "0"), (2, 0, "", "0"), (2, 3, "5,6,7", "7"), (2, 2, "5, 6", "5")],
)
def test_a_gpu_of_its_own_if_there_is_one(num_workers: int, num_gpus: int, names: str, device: str):
    assert visible_device(num_workers, num_gpus, names) == device
