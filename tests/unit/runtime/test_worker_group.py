"""Which devices workers see, whatever the script does to its environment later."""

from __future__ import annotations

import pytest

from moreh_ap.runtime.worker_environment import worker_environment
from moreh_ap.runtime.worker_group import WorkerGroup


def devices(request):
    return [
        worker_environment(
            rank,
            request.num_workers,
            device_type=request.device_type,
            visible_devices=request.visible_devices,
            threads_per_worker=1,
            store_port=1,
        )["CUDA_VISIBLE_DEVICES"]
        for rank in range(request.num_workers)
    ]


@pytest.fixture
def asked(monkeypatch):
    """What meshes ask for; none starts anything."""
    requests = []
    monkeypatch.setattr("moreh_ap.runtime.worker_group.Launcher", lambda request, _: requests.append(request))
    monkeypatch.setattr("threading.Thread.start", lambda thread: None)
    monkeypatch.setattr("atexit.register", lambda function: None)
    return requests


def test_the_devices_are_those_of_the_moment_the_mesh_was_asked_for(monkeypatch, asked):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    WorkerGroup(2, device_type="cuda", threads_per_worker=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    WorkerGroup(2, device_type="cuda", threads_per_worker=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as scripts do it behind the line
    WorkerGroup(2, device_type="cuda", threads_per_worker=1, visible_devices="")
    assert [devices(request) for request in asked] == [["0", "1"], ["4", "6"], ["0", "1"]]
