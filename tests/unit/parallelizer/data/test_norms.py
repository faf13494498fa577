"""The norm over parts that workers hold: as over the whole, and of the parts' own kind."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.distributed as dist

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.data import norms

CPU = torch.device("cpu")
PARTS = [torch.tensor([3.0, -4.0]), torch.tensor([[12.0]]), torch.empty(0)]


@pytest.mark.parametrize(("order", "expected"), [(1.0, 19.0), (2.0, 13.0), (math.inf, 12.0)])
def test_a_worker_alone_has_the_norm_of_all_its_elements(order, expected):
    found = norms.total_norm(PARTS, order, CPU, num_workers=1)
    assert found.item() == pytest.approx(expected) and found.dim() == 0


def test_complex_elements_count_by_their_magnitude():
    parts = [torch.tensor([3.0 + 4.0j]), torch.tensor([12.0])]
    for order, expected in [(1.0, 17.0), (2.0, 13.0), (math.inf, 12.0)]:
        found = norms.total_norm(parts, order, CPU, num_workers=1)
        assert found.dtype == torch.float32 and found.item() == pytest.approx(expected)


@pytest.mark.parametrize(("order", "expected"), [(1.0, 19.0), (2.0, 13.0), (3.0, 1819 ** (1 / 3)), (math.inf, 12.0)])
def test_two_workers_have_the_norm_of_both_s_elements(monkeypatch, order, expected):
    """Each in a thread; what they hand in is summed, or the largest of it taken."""
    barrier, handed, found = threading.Barrier(2), [], {}

    def all_reduce(tensor, op=dist.ReduceOp.SUM):
        handed.append(tensor.clone())
        barrier.wait()
        both = torch.stack(handed)
        tensor.copy_(both.sum(0) if op == dist.ReduceOp.SUM else both.amax(0))

    def work(rank, parts):
        found[rank] = norms.total_norm(parts, order, CPU, num_workers=2)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((PARTS[:1], PARTS[1:]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert [found[rank].item() for rank in (0, 1)] == pytest.approx([expected] * 2)
    assert found[0].dtype == torch.float32


def test_low_precision_is_added_up_in_float32_and_gradients_are_left_alone():
    part = torch.full((10_000,), 1.0, dtype=torch.bfloat16, requires_grad=True)
    found = norms.total_norm([part], 2.0, CPU, num_workers=1)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(100.0) and not found.requires_grad
    assert norms.total_norm([torch.ones(2, dtype=torch.float64)], 2.0, CPU, 1).dtype == torch.float64


def test_a_worker_without_parts_has_norm_zero():
    assert norms.total_norm([], 2.0, CPU, num_workers=1).item() == 0.0


@pytest.mark.parametrize("order", [0.0, -1.0, math.nan])
def test_orders_that_are_not_above_0_are_refused(order):
    with pytest.raises(UnsupportedError, match="order"):
        norms.total_norm(PARTS, order, CPU, num_workers=1)
