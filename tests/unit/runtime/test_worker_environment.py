"""The environment that a worker starts with."""

from __future__ import annotations

import pytest

from moreh_ap.errors import MeshStartError
from moreh_ap.runtime.worker_environment import worker_environment


def environment(rank: int, visible_devices: str, device_type: str = "cuda") -> dict[str, str]:
    return worker_environment(rank, 2, device_type=device_type, visible_devices=visible_devices, threads_per_worker=1)


def test_fewer_devices_than_workers_are_an_error():
    with pytest.raises(MeshStartError, match="2 workers need 2 GPUs, but CUDA_VISIBLE_DEVICES=0 shows 1"):
        environment(0, "0")


def test_each_worker_sees_its_own_device_and_those_on_the_cpu_are_told_of_none():
    assert [environment(rank, "4, 6")["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["4", "6"]
    assert [environment(rank, "")["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["0", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in environment(0, "0", device_type="cpu")


def test_what_sets_the_device_by_its_local_rank_finds_the_one_that_is_visible():
    assert [environment(1, "4,6")[name] for name in ("RANK", "LOCAL_RANK")] == ["1", "0"]
    assert environment(1, "", device_type="cpu")["LOCAL_RANK"] == "1"
