"""Which build of PyTorch is installed, from the version of the GPU driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import torch_index


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", 535),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", 580),
        ("GCC version:  gcc version 12.3.0", None),
    ],
)
def test_the_kernel_module_says_its_version(text, driver):
    assert torch_index.driver_of(text) == driver


@pytest.mark.parametrize(
    ("driver", "end"), [(None, ""), (590, ""), (580, ""), (575, "/cu126"), (525, "/cu126"), (470, "/cpu")]
)
def test_a_driver_gets_the_build_that_it_can_run(driver, end):
    assert torch_index.index_for(driver).endswith(end) and bool(torch_index.index_for(driver)) == bool(end)


def test_a_driver_without_a_build_is_named(capsys):
    assert torch_index.main(["470.82.01"]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip().endswith("/cpu") and "driver here, 470, is older than 525" in shown.err
