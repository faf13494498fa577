"""What workers measure of the links between them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from moreh_ap.runtime.worker import probe_exchanges

CPU = torch.device("cpu")


def test_every_kind_of_exchange_is_measured_in_pairs_and_together(world, monkeypatch):
    monkeypatch.setattr(probe_exchanges, "_SLOW_S", math.inf)  # a busy machine takes any time
    found = list(probe_exchanges.measure_exchanges(CPU))
    kinds = {"sum", "gather", "scatter", "message", "crossing_sum", "crossing_split"}
    sizes = {2, world} if world % 2 == 0 else {world}
    assert {row[:2] for row in found} == {(kind, size) for kind in kinds for size in sizes}
    assert all(math.isfinite(row[3]) and row[3] > 0.0 and row[4] > 0.0 for row in found)
    for kind, size in {row[:2] for row in found}:
        num_bytes = [row[2] for row in found if row[:2] == (kind, size)]
        assert num_bytes == sorted(set(num_bytes)) and num_bytes[-1] == pytest.approx(1 << 22, rel=0.01)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_hosts_are_measured_inside_and_between(world):
    before = len(dist.distributed_c10d._world.pg_map)
    inside = {row[:2] for row in probe_exchanges.measure_exchanges(CPU, per_host=2)}
    assert {size for _, size in inside} == {2}, "nothing inside of a host has four members"
    found = list(probe_exchanges.measure_between(CPU, per_host=2))
    assert {row[1] for row in found} == {2, 4} and len({row[0] for row in found}) == 6
    assert len(dist.distributed_c10d._world.pg_map) == before
    assert not list(probe_exchanges.measure_exchanges(CPU, per_host=1))


@pytest.mark.parametrize("world", [4], indirect=True)
def test_one_worker_of_each_host_is_a_group(world):
    group = probe_exchanges._group(2, 2)
    assert dist.get_process_group_ranks(group) == [0, 2]
    assert dist.get_process_group_ranks(probe_exchanges._group(2, 1)) == [0, 1]
    assert probe_exchanges._group(4, 1) is dist.group.WORLD


def test_what_takes_long_is_not_measured_with_more_bytes(world, monkeypatch):
    monkeypatch.setattr(probe_exchanges, "_SLOW_S", 0.0)
    found = list(probe_exchanges.measure_between(CPU, per_host=world))
    assert len({row[:2] for row in found}) == len(found), "one number of bytes each"


def test_pairs_are_given_up_after_use(world, monkeypatch):
    monkeypatch.setitem(probe_exchanges._BYTES, "cpu", (1 << 10,))
    before = len(dist.distributed_c10d._world.pg_map)
    list(probe_exchanges.measure_exchanges(CPU))
    assert len(dist.distributed_c10d._world.pg_map) == before
