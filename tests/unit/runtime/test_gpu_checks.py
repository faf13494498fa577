"""What is said of GPUs that cannot be used, with `torch.cuda` answering as if it were there."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.accelerator.worker_starts import WorkerStarts
from moreh_ap.errors import OptionError, UnsupportedError
from moreh_ap.runtime import gpu_checks
from moreh_ap.settings import Options


def lines(error):
    return [line.partition(":")[0] for line in str(error.value).splitlines()[1:]]


@pytest.mark.parametrize(("driver", "built_for"), [(13000, "13.0"), (12020, "12.8"), (13020, "12.6"), (0, "13.0")])
def test_a_driver_of_the_same_or_a_later_version_will_do(driver, built_for):
    gpu_checks.check_driver(driver, built_for)


def test_a_driver_that_is_too_old():
    with pytest.raises(OptionError, match=r"supports CUDA 12\.2, and PyTorch .* was built for CUDA 13\.0") as error:
        gpu_checks.check_driver(12020, "13.0")
    assert "580 or later, or a PyTorch built for CUDA 12" in str(error.value) and "/whl/cu126" in str(error.value)
    assert lines(error) == ["Allowed", "Try", "See"]
    with pytest.raises(OptionError) as error:
        gpu_checks.check_driver(11040, "13.0")
    assert "CPU workers" in str(error.value) and "built for CUDA 11" not in str(error.value)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, as far as the script's process sees them."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_checks, "driver_version", lambda: 13000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def test_the_line_refuses_a_driver_that_is_too_old(gpus, monkeypatch):
    monkeypatch.setattr(gpu_checks, "driver_version", lambda: 12080)
    with pytest.raises(OptionError, match=r"CUDA 12\.8"):
        WorkerStarts(Options())


def test_the_line_refuses_a_script_with_tensors_on_a_gpu(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: index * 2**20)
    with pytest.raises(UnsupportedError, match=r"1\.0 MiB of tensors are on cuda:1 already") as error:
        WorkerStarts(Options())
    assert lines(error) == ["Allowed", "Try", "See"]


def test_a_context_without_tensors_does_no_harm(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 0)
    gpu_checks.check_script_process()


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((10, 3), ["sm_90a", "sm_100", "compute_120"], True),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((6, 1), ["sm_75", "sm_80", "sm_90", "compute_90"], False),
        ((12, 0), ["sm_90", "sm_100"], False),
        ((9, 0), [], True),
    ],
)
def test_a_device_needs_code_for_its_architecture(capability, built_for, runs):
    if runs:
        gpu_checks.check_architecture("a GPU", capability, built_for)
        return
    with pytest.raises(UnsupportedError, match=f"sm_{capability[0]}{capability[1]}") as error:
        gpu_checks.check_architecture("a GPU", capability, built_for)
    assert lines(error) == ["Allowed", "Try", "See"]


def test_a_worker_asks_for_its_own_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P40")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    with pytest.raises(UnsupportedError, match="Tesla P40"):
        gpu_checks.check_worker_s_device()
