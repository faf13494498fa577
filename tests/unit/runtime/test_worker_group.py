"""Which devices workers see, whatever the script does to its environment later."""

from __future__ import annotations

import pytest

from moreh_ap.errors import MeshStartError
from moreh_ap.runtime.engine_error import EngineError, start_error
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


@pytest.mark.parametrize(("errors", "starts"), [(["Timeout", "ended"], 2), (["ended"], 1), (["Timeout"] * 2, 2)])
def test_a_start_that_took_too_long_is_tried_once_more(monkeypatch, errors, starts):
    """Eight workers that import PyTorch from a disk for the first time may need more than the engine's 30 s."""
    launchers = []

    class Failing:
        pids = ()

        def __init__(self, request, is_stopping):
            self.has_ended = False
            launchers.append(self)

        def start(self, *unused):
            cause = EngineError(errors[len(launchers) - 1])
            raise start_error(cause) from cause

        def kill(self):
            pass

        def end(self):
            self.has_ended = True

    monkeypatch.setattr("moreh_ap.runtime.worker_group.Launcher", Failing)
    group = WorkerGroup(8, device_type="cpu", threads_per_worker=1)
    with pytest.raises(MeshStartError):
        group.wait_ready(10.0)
    group.close()
    assert len(launchers) == starts and all(launcher.has_ended for launcher in launchers)
