"""Plans: text to plan and back, and every value that is none."""

from __future__ import annotations

import itertools
import pickle

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(), "replicate=1"),
        (Plan(replicate=2), "replicate=2"),
        (Plan(shard=4), "shard=4"),
        (Plan(precision="bf16"), "precision=bf16"),
        (Plan(2, 2, 4, "bf16"), "replicate=2,shard=2,micro_batches=4,precision=bf16"),
    ],
)
def test_text(plan, text):
    assert str(plan) == text


def test_round_trip_of_every_small_plan():
    for values in itertools.product((1, 2, 3), (1, 2, 8), (1, 4), ("fp32", "bf16")):
        plan = Plan(*values)
        assert Plan.parse(str(plan)) == plan
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert plan.num_devices == values[0] * values[1]


def test_spaces_and_order_do_not_matter():
    assert Plan.parse(" precision = bf16 , shard=2 ") == Plan(shard=2, precision="bf16")


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context", "expert"])
def test_axes_of_later_versions_are_named(axis):
    with pytest.raises(PlanError, match=f"{axis}' is not in this version"):
        Plan.parse(f"{axis}=2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read ''"),
        ("shard", "cannot read 'shard'"),
        ("shards=2", "cannot read 'shards=2'"),
        ("shard=2,", "cannot read ''"),
        ("shard=2,shard=2", "shard comes twice"),
        ("shard=two", "shard='two' is no size"),
        ("shard=0", "shard=0 is no size"),
        ("replicate=-1", "replicate=-1 is no size"),
        ("micro_batches=1.5", "micro_batches='1.5' is no size"),
        ("precision=fp16", "precision='fp16' is unknown"),
    ],
)
def test_text_that_is_no_plan(text, message):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert message in caught.value.fact
    assert Plan.parse(caught.value.fix.removeprefix("plan=").strip('"'))


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
@pytest.mark.parametrize("name", ["replicate", "shard", "micro_batches"])
def test_sizes_that_are_none(name, size):
    with pytest.raises(PlanError, match=f"{name}="):
        Plan(**{name: size})


def test_parse_wants_text():
    with pytest.raises(PlanError, match="is a int"):
        Plan.parse(2)


def test_platform_line():
    assert Plan(shard=4, micro_batches=4).platform_line(16) == (
        "num_stages : 1, num_micro_batches : 4, batch_per_device : 1, No TP, recomputation : 0, "
        "distribute_param : true, distribute_low_prec_param : false"
    )


def test_platform_line_counts_the_fullest_device():
    line = Plan(replicate=2).platform_line(5)
    assert "batch_per_device : 3," in line
    assert "distribute_param : false," in line
