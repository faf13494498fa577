"""Addresses of accelerator tensors: alike for one memory, and nothing can be read there."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from unit.device.samples import promise


def addresses(*tensors):
    return [tensor.data_ptr() for tensor in tensors]


def test_tensors_with_one_memory_have_one_address():
    here, other = torch.ones(4).cuda(), torch.ones(4).cuda()
    assert here.data_ptr() == here.view(2, 2).data_ptr() == here.untyped_storage().data_ptr() != other.data_ptr()
    assert here[1:].data_ptr() == here.data_ptr() + 4
    _, promised = promise(torch.ones(4))
    assert promised.data_ptr() == promised.detach().data_ptr() != here.data_ptr()


def test_nothing_is_mapped_at_an_address():
    _, promised = promise(torch.ones(4))
    with open("/proc/self/maps") as maps:
        ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
    for address in addresses(torch.ones(4).cuda(), promised):
        assert not any(low <= address < high for low, high in ranges)
        assert address < 1 << 63


@pytest.mark.parametrize("read", ["ctypes.c_float.from_address(address).value", "ctypes.string_at(address, 4)"])
def test_reading_at_an_address_ends_the_process(read: str):
    address = torch.ones(4).cuda().data_ptr()
    done = subprocess.run([sys.executable, "-c", f"import ctypes; address = {address}; print({read})"], check=False)
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS)
