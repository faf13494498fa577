"""Calls that name a CUDA device run on the worker's device, with and without shares of means."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.surroundings.placement import OwnDevice

CPU = torch.device("cpu")
CALLS = {
    "to by name": lambda x: x.to("cuda"),
    "to by number and dtype": lambda x: x.to(torch.device("cuda", 1), torch.float64),
    "to by keyword": lambda x: x.to(device="cuda:3"),
    "cuda": lambda x: x.cuda(),
    "a new tensor": lambda x: torch.zeros(2, device="cuda"),
    "like another": lambda x: torch.ones_like(x, device=torch.device("cuda")),
    "from the tensor": lambda x: x.new_zeros(2, device="cuda:0"),
    "a dtype": lambda x: x.to(torch.float16),
    "another tensor": lambda x: x.to(x),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mode", [OwnDevice(CPU), GlobalReduction(CPU, record=True)], ids=["whole", "split"])
def test_a_cuda_device_means_the_worker_s(mode, name):
    with mode:
        assert CALLS[name](torch.ones(2)).device == CPU
