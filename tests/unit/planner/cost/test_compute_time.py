"""Rates of elementwise work as they were measured, and hosts that compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unit.planner.cost.samples import DEVICE, SYSTEM, TINY, step


def test_what_starts_operations_is_what_computes_on_a_cpu():
    beside = replace(SYSTEM, host_computes=False)
    assert step("replicate=1", system=beside).host_s == 0.0
    operations = 8 * TINY.block.num_kernels + TINY.first.num_kernels + TINY.last.num_kernels
    assert step("replicate=1").host_s == pytest.approx(2.5 * 1e-5 * operations)


def test_elementwise_work_runs_at_the_rate_that_was_measured_for_as_much():
    slow, fast = (replace(DEVICE, elementwise=((1e3, rate), (1e12, rate))) for rate in (1e9, 1e10))
    times = [step("replicate=1", device=device) for device in (slow, fast)]
    products = step("replicate=1", device=replace(DEVICE, elementwise=((1.0, 1e30),)))
    parts = [one.forward_s + one.backward_s - products.forward_s - products.backward_s for one in times]
    assert parts[0] == pytest.approx(10 * parts[1])
    faster = replace(DEVICE, fp32_flops=1e18, elementwise=((1e7, 1e10), (1e9, 1e9)))
    few, many = (step("replicate=1", device=faster, rows=rows) for rows in (1, 64))
    assert many.forward_s > 100 * few.forward_s, "what leaves the cache is slower"


def test_a_product_with_a_table_of_no_entries_takes_no_time():
    block = TINY.block
    with_none = replace(TINY, block=replace(block, products=(*block.products, replace(block.products[0], inner=0))))
    assert step("replicate=1", profile=with_none) == step("replicate=1")
