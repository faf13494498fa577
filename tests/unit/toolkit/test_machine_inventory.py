"""What a machine has, as far as it can be read."""

from __future__ import annotations

import os

import pytest

from moreh_ap.toolkit import machine_inventory


def test_without_gpus_a_machine_has_the_cores_that_processes_may_use(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    found = machine_inventory.look()
    assert (found.supply.device_type, found.supply.num_devices, found.gpus) == ("cpu", 3, ())
    assert found.supply.memory_bytes > 0 and found.processor


@pytest.mark.parametrize(
    ("visible", "drivers", "may"), [("", True, False), ("-1", True, False), ("0", True, True), ("0", False, False)]
)
def test_pytorch_is_asked_only_where_there_may_be_a_gpu(monkeypatch, visible, drivers, may):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(os.path, "exists", lambda path: drivers)
    assert machine_inventory._may_have_gpus() is may


def test_what_cannot_be_read_is_none():
    def missing(index):
        raise ModuleNotFoundError("pynvml")

    assert machine_inventory._reading(missing, 0) is None
    assert machine_inventory._reading(lambda index: 40 + index, 1) == 41
    assert (machine_inventory._in_watts(None), machine_inventory._in_watts(70_500)) == (None, 70.5)


def test_a_gpu_is_called_what_the_variable_calls_it(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-bb22")
    found = [machine_inventory._names(index, uuid) for index, uuid in enumerate(("aa11", "GPU-bb22"))]
    assert found == [("4", "GPU-aa11"), ("GPU-bb22", "GPU-bb22")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine_inventory._names(1, "") == ("1",)
    gpu = machine_inventory.Gpu(0, "H100", 1, names=found[0])
    assert gpu.is_called("4") and gpu.is_called("GPU-aa") and not gpu.is_called("0") and not gpu.is_called("GPU-b")
