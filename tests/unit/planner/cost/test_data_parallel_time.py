"""The exchanges of devices that share the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import COEFFICIENTS
from moreh_ap.planner.cost.training_systems import MOREH_AP, MOREH_AP_ON_CPU
from unit.planner.cost.samples import LARGE_PROFILE, estimate


def test_gathering_sharded_weights_takes_longer_for_more_micro_batches():
    few, many = (estimate(Plan(1, 64, micro_batches=count, precision="bf16")) for count in (1, 8))
    assert many.data_s + many.data_hidden_s > 4 * (few.data_s + few.data_hidden_s)


def exchanges_s(plan: Plan) -> float:
    """Returns the seconds of gathering and summing, hidden or not."""
    found = estimate(plan)
    return found.data_s + found.data_hidden_s


def test_every_micro_batch_scatters_its_gradients_and_the_last_sums_those_of_replicas():
    def added_s(replicate: int, pipeline: int = 1) -> list[float]:
        plans = [Plan(replicate, 8, pipeline=pipeline, micro_batches=count, precision="bf16") for count in (4, 8, 12)]
        few, more, most = map(exchanges_s, plans)
        return [more - few, most - more]

    scatter_s = added_s(1)
    assert scatter_s[0] == pytest.approx(scatter_s[1])
    once = replace(MOREH_AP, reduces_every_micro_batch=False)
    fewer, later = (estimate(Plan(1, 8, micro_batches=count, precision="bf16"), system=once) for count in (4, 8))
    gathers_s = later.data_s + later.data_hidden_s - fewer.data_s - fewer.data_hidden_s
    assert scatter_s[0] > 1.5 * gathers_s  # 4 bytes a parameter go out, and 2 x 2 come in
    assert added_s(8) == pytest.approx(scatter_s)  # sums over replicas do not grow
    assert added_s(1, pipeline=4) == pytest.approx([0.0, 0.0])


def test_parameters_in_host_memory_are_copied_for_every_use_and_stepped_by_the_host():
    one, two = (estimate(Plan(1, 8, micro_batches=count, offload="all")) for count in (1, 2))
    kept = estimate(Plan(1, 8))
    copied_s = one.data_s + one.data_hidden_s - kept.data_s - kept.data_hidden_s
    assert copied_s == pytest.approx(12.0 * LARGE_PROFILE.parameters / 8 / COEFFICIENTS.host_bytes_per_s, rel=1e-3)
    assert two.data_s + two.data_hidden_s > 1.9 * (one.data_s + one.data_hidden_s)
    alone = estimate(Plan(offload="all"))
    assert alone.data_hidden_s == 0.0  # nothing is on its way beside the block that computes
    assert alone.data_s == pytest.approx(12.0 * LARGE_PROFILE.parameters / COEFFICIENTS.host_bytes_per_s, rel=1e-3)
    assert one.optimizer_s == pytest.approx(alone.optimizer_s, rel=1e-3)  # eight parts, and eight devices at a time
    assert two.optimizer_s > one.optimizer_s > estimate(Plan(1, 8, offload="optimizer")).optimizer_s
    on_cpu, plain = (estimate(Plan(1, 8, offload=word), system=MOREH_AP_ON_CPU) for word in ("all", "none"))
    assert on_cpu.optimizer_s == plain.optimizer_s


def test_embedding_and_head_as_units_take_one_more_exchange_each_time():
    plan = Plan(1, 8, precision="bf16")
    apart, together = (
        estimate(plan, system=replace(MOREH_AP, outer_unit_parameters=least)) for least in (1.0, float("inf"))
    )
    added_s = apart.data_s + apart.data_hidden_s - together.data_s - together.data_hidden_s
    assert 0.0 < added_s < 1e-3
