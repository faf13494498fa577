"""Plans as text, their stages, and the platform's line."""

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
        (Plan(2, 2, micro_batches=4, precision="bf16"), "replicate=2,shard=2,micro_batches=4,precision=bf16"),
        (Plan(tensor=4, sequence_parallel=True), "tensor=4,sequence_parallel=true"),
        (Plan(pipeline=2), "pipeline=2,micro_batches=2"),
        (Plan(pipeline=2, schedule="gpipe", micro_batches=1), "pipeline=2,micro_batches=1,schedule=gpipe"),
        (
            Plan(pipeline=2, schedule="interleaved"),
            "pipeline=2,micro_batches=4,schedule=interleaved,stages_per_device=2",
        ),
        (Plan(pipeline=2, layers=(3, 5)), "pipeline=2,micro_batches=2,layers=3+5"),
        (Plan(recompute="full", offload="optimizer"), "recompute=full,offload=optimizer"),
        (Plan(shard=2, offload="all"), "shard=2,offload=all"),
        (Plan(recompute=2), "recompute=2"),
        (Plan(shard=2, compile="blocks"), "shard=2,compile=blocks"),
    ],
)
def test_text(plan, text):
    assert str(plan) == text


def test_round_trip_of_every_small_plan():
    pipelines = [
        {},
        {"micro_batches": 4},
        {"pipeline": 2},
        {"pipeline": 2, "schedule": "gpipe", "micro_batches": 1},
        {"pipeline": 3, "schedule": "interleaved", "stages_per_device": 3, "layers": (1, 2, 1, 1, 1, 1, 1, 1, 3)},
        {"pipeline": 2, "schedule": "zero_bubble", "micro_batches": 6},
        {"pipeline": 2, "schedule": "zero_bubble", "stages_per_device": 2},
    ]
    tensors = [{}, {"tensor": 2}, {"tensor": 4, "sequence_parallel": True}]
    recomputes = ["none", "selective", "full", 1, 3]
    for replicate, shard, tensor, pipeline, recompute, precision, offload in itertools.product(
        (1, 3), (1, 2), tensors, pipelines, recomputes, ("fp32", "bf16"), ("none", "optimizer")
    ):
        plan = Plan(replicate, shard, **tensor, **pipeline, recompute=recompute, precision=precision, offload=offload)
        assert Plan.parse(str(plan)) == plan
        assert hash(Plan.parse(str(plan))) == hash(plan)
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert plan.data_parallel == replicate * shard
        assert plan.num_devices == replicate * shard * plan.tensor * plan.pipeline


@pytest.mark.parametrize(
    ("text", "micro_batches", "stages_per_device"),
    [
        ("shard=2", 1, 1),
        ("pipeline=3", 3, 1),
        ("pipeline=3,schedule=gpipe", 3, 1),
        ("pipeline=3,schedule=interleaved", 6, 2),
        ("pipeline=3,schedule=interleaved,stages_per_device=3", 9, 3),
        ("pipeline=3,schedule=zero_bubble", 3, 1),
    ],
)
def test_what_is_left_out_of_a_pipeline(text, micro_batches, stages_per_device):
    plan = Plan.parse(text)
    assert (plan.micro_batches, plan.stages_per_device) == (micro_batches, stages_per_device)
    assert plan.num_stages == plan.pipeline * stages_per_device


def test_the_long_form_of_the_documentation():
    text = (
        "replicate=2,shard=2,tensor=2,sequence_parallel=true,pipeline=2,micro_batches=4,schedule=1f1b,layers=3+5,"
        "recompute=full,precision=bf16,offload=optimizer"
    )
    assert str(Plan.parse(text)) == text.replace("schedule=1f1b,", "")
    assert Plan.parse(text).num_devices == 16


@pytest.mark.parametrize(
    ("plan", "num_blocks", "sizes"),
    [
        ("shard=2", 5, [5]),
        ("pipeline=2", 8, [4, 4]),
        ("pipeline=2", 5, [3, 2]),
        ("pipeline=4", 9, [2, 3, 2, 2]),
        ("pipeline=4", 11, [3, 3, 3, 2]),
        ("pipeline=2,layers=3+5", 8, [3, 5]),
        ("pipeline=2,schedule=interleaved", 6, [1, 2, 2, 1]),
    ],
)
def test_blocks_of_stages(plan, num_blocks, sizes):
    ranges = Plan.parse(plan).stage_ranges(num_blocks)
    assert [len(part) for part in ranges] == sizes
    assert [block for part in ranges for block in part] == list(range(num_blocks))


@pytest.mark.parametrize(
    ("plan", "num_blocks", "message"),
    [
        ("pipeline=4", 3, "3 blocks, too few for 4 stages"),
        ("pipeline=4", 1, "1 blocks, too few for 4 stages"),
        ("pipeline=2,schedule=interleaved", 3, "3 blocks, too few for 4 stages"),
        ("pipeline=2,layers=3+5", 9, "layers has 8 blocks, the model 9"),
    ],
)
def test_blocks_that_do_not_fit_the_stages(plan, num_blocks, message):
    with pytest.raises(PlanError, match=message) as caught:
        Plan.parse(plan).stage_ranges(num_blocks)
    assert Plan.parse(caught.value.fix.removeprefix("plan=").strip('"')).stage_ranges(num_blocks)


def test_spaces_and_order_do_not_matter():
    assert Plan.parse(" precision = bf16 , shard=2 ") == Plan(shard=2, precision="bf16")


@pytest.mark.parametrize("axis", ["context", "expert"])
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
        ("tensor=0", "tensor=0 is no size"),
        ("tensor=2,sequence_parallel=yes", "sequence_parallel='yes' is unknown"),
        ("sequence_parallel=true", "sequence_parallel=true with tensor=1"),
        ("pipeline=-2", "pipeline=-2 is no size"),
        ("micro_batches=0", "micro_batches=0 is no size"),
        ("pipeline=2,stages_per_device=0,schedule=interleaved", "stages_per_device=0 is no size"),
        ("pipeline=2,schedule=zigzag", "schedule='zigzag' is unknown"),
        ("schedule=gpipe", "schedule=gpipe with pipeline=1"),
        ("schedule=interleaved", "schedule=interleaved with pipeline=1"),
        ("stages_per_device=2", "stages_per_device=2 with pipeline=1"),
        ("layers=3+5", "layers=3+5 with pipeline=1"),
        ("pipeline=2,layers=3", "layers=3, but pipeline x stages_per_device = 2 x 1 = 2 stages"),
        ("pipeline=2,layers=3+0", "layers=3+0: 0 is no number of blocks"),
        ("pipeline=2,layers=3+b", "layers=3+b: 'b' is no number of blocks"),
        ("pipeline=2,stages_per_device=2", "stages_per_device=2 with schedule=1f1b"),
        ("pipeline=2,schedule=gpipe,stages_per_device=2", "stages_per_device=2 with schedule=gpipe"),
        ("pipeline=2,schedule=interleaved,stages_per_device=1", "nothing to interleave"),
        ("pipeline=4,micro_batches=2", "schedule=1f1b cannot run micro_batches=2 with pipeline=4"),
        ("pipeline=2,schedule=zero_bubble,micro_batches=5", "zero_bubble cannot run micro_batches=5"),
        ("recompute=banana", "recompute='banana' is unknown"),
        ("recompute=0", "recompute=0 is unknown"),
        ("recompute=-1", "recompute=-1 is unknown"),
        ("offload=most", "offload='most' is unknown"),
        ("tensor=2,offload=all", "offload=all with tensor=2"),
        ("pipeline=2,offload=all", "offload=all with pipeline=2"),
        ("shard=2,tensor=2,pipeline=2,offload=all", "offload=all with tensor=2"),
    ],
)
def test_text_that_is_no_plan(text, message):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert message in caught.value.fact
    assert Plan.parse(caught.value.fix.removeprefix("plan=").strip('"'))


def test_blocks_are_gathered_in_turn_where_shards_or_host_memory_have_them():
    texts = ("replicate=2", "shard=2", "offload=all", "replicate=2,offload=optimizer", "shard=2,pipeline=2")
    assert [Plan.parse(text).gathers_in_turn for text in texts] == [False, True, True, False, False]


def test_the_whole_model_is_on_the_device_where_only_state_is_in_host_memory():
    for offload, left in (("none", "none"), ("optimizer", "optimizer"), ("all", "optimizer")):
        assert Plan(shard=2, offload=offload).whole_model() == Plan(2, offload=left)


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


def test_platform_line_of_every_axis():
    plan = Plan(replicate=2, tensor=2, pipeline=2, schedule="interleaved", recompute="full")
    assert plan.platform_line(16) == (
        "num_stages : 4, num_micro_batches : 4, batch_per_device : 2, TP : 2, recomputation : 2, "
        "distribute_param : false, distribute_low_prec_param : false"
    )
    assert "recomputation : 1," in Plan(recompute="selective").platform_line(1)
    assert "recomputation : 2," in Plan(recompute=3).platform_line(1)


def test_compiled_blocks():
    plan = Plan.parse("shard=2,recompute=full,compile=blocks")
    assert Plan.parse("shard=2,recompute=full").with_compiled_blocks() == plan
    assert plan.whole_model() == Plan(2), "gradients of gradients need what is not compiled"
    for text in ("tensor=2", "pipeline=2,schedule=zero_bubble"):
        other = Plan.parse(text)
        assert other.with_compiled_blocks() == other
        with pytest.raises(PlanError, match="compile=blocks cannot be") as caught:
            Plan.parse(f"{text},compile=blocks")
        assert other.why_uncompiled in str(caught.value)
