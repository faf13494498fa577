"""The exchanges of devices that share the batch."""

from __future__ import annotations

from moreh_ap.plan import Plan
from unit.planner.cost.samples import estimate


def test_gathering_sharded_weights_takes_longer_for_more_micro_batches():
    few, many = (estimate(Plan(1, 64, micro_batches=count, precision="bf16")) for count in (1, 8))
    assert many.data_s + many.data_hidden_s > 4 * (few.data_s + few.data_hidden_s)
