"""Which plans are tried."""

from moreh_ap.session.planning.autotune import plans_to_try
from unit.session.planning.samples import candidate


def test_plans_that_are_tried_differ_in_their_axes_first():
    names = [
        "tensor=2,micro_batches=2", "tensor=2", "replicate=2", "replicate=2,recompute=full", "shard=2",
        "pipeline=2,micro_batches=4",
    ]  # fmt: skip
    ranked = [candidate(name) for name in names]
    assert [str(one.plan) for one in plans_to_try(ranked, 3)] == [str(ranked[i].plan) for i in (0, 2, 4)]
    assert [str(one.plan) for one in plans_to_try(ranked[:4], 3)] == [str(ranked[i].plan) for i in (0, 1, 2)]
    assert plans_to_try([], 3) == []
