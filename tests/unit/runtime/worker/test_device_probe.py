"""What a worker measures of its device."""

from __future__ import annotations

import time

import pytest
import torch

from moreh_ap.runtime.worker import device_probe, probe_exchanges
from moreh_ap.session.planning.device_rates import as_entry, rates_of

CPU = torch.device("cpu")


def test_a_worker_alone_measures_its_processor(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = device_probe.measure(CPU, bf16=False)
    finally:
        torch.set_num_threads(threads)
    assert {row[:3] for row in found.products} == {("fp32", 1024, 1024), ("fp32", 64, 1024), ("fp32", 1024, 64)}
    assert all(1e8 < row[3] < 1e13 for row in found.products)
    assert [row[0] for row in found.elementwise] == ["fp32", "fp32"] and found.exchanges == ()
    assert found.elementwise[0][1] == 512 * 256 * 35 * 4, "35 values for each of the hidden state, four bytes each"
    assert 1e-7 < found.start_s < 1e-3 and found.update_bytes_per_s > 1e7


def test_seconds_are_those_of_the_processor_not_of_the_clock(monkeypatch):
    def sleeps() -> None:
        time.sleep(0.005)
        sum(range(20_000))

    monkeypatch.setattr(device_probe, "_SERIES_S", 0.003)
    found = device_probe._seconds(sleeps, CPU)
    assert 0.0 < found < 0.005, "a worker that waits for its core is not slower"


def test_a_run_that_takes_twice_as_long_is_twice_as_slow():
    once, twice = (device_probe._seconds(lambda n=n: sum(range(n * 100_000)), CPU) for n in (1, 4))
    assert 2.0 < twice / once < 8.0


@pytest.fixture
def small(monkeypatch):
    """What is measured is small, and each of it measured for a moment only."""
    monkeypatch.setattr(device_probe, "_SERIES_S", 0.001)
    monkeypatch.setitem(device_probe._LONG, "cpu", 128)
    monkeypatch.setitem(device_probe._ROWS, "cpu", (16, 64))
    monkeypatch.setitem(device_probe._PARAMETER, "cpu", (32, 32))
    monkeypatch.setitem(probe_exchanges._BYTES, "cpu", (1 << 10, 1 << 14))


def test_both_precisions_are_measured_where_asked(small):
    found = device_probe.measure(CPU, bf16=True)
    for table in (found.products, found.elementwise):
        assert {row[0] for row in table} == {"fp32", "bf16"}
    one, other = (next(row[1] for row in found.elementwise if row[0] == name) for name in ("fp32", "bf16"))
    assert one == 2 * other


def test_what_is_multiplied_is_random_and_no_draw_of_a_model_is_used_up(small):
    before, products = torch.get_rng_state(), []
    multiply = torch.nn.functional.linear

    def seen(left, right):
        products.append((left.std(), right.std()))
        return multiply(left, right)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_probe.F, "linear", seen)
        device_probe._product_flops_per_s(64, 64, "fp32", CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(0.9 < float(std) < 1.1 for pair in products for std in pair)


def test_the_small_block_is_made_of_the_operations_that_are_counted():
    block, hidden = device_probe._Block(32), torch.randn(2, 3, 32)
    assert block(hidden).shape == hidden.shape
    block(hidden).sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())


def test_all_that_is_measured_survives_the_file(world, small):
    found = device_probe.measure(CPU, bf16=False)
    assert found.exchanges and rates_of(as_entry(found)) == found


def test_what_is_queued_is_waited_for_once_a_series(monkeypatch):
    """A device that takes 1 ms for a run, and 5 ms more to say that it is through."""
    clock, queued, waits = [0.0], [0], []

    def wait() -> None:
        clock[0] += 0.001 * queued[0] + 0.005
        waits.append(queued[0])
        queued[0] = 0

    monkeypatch.setattr(device_probe.time, "perf_counter", lambda: clock[0])
    found = device_probe._queued_seconds(lambda: queued.__setitem__(0, queued[0] + 1), wait)
    assert waits[:2] == [1, 2], "the first run finds its kernel, two more tell how many fill a series"
    assert len(waits) == 2 + device_probe._SERIES and min(waits[2:]) >= 4
    assert 0.001 < found < 0.00325, "waiting is shared by the runs of a series"
