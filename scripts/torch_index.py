"""Prints from which index pip takes a PyTorch that this machine's GPU driver can run; nothing for pip's own.

    python scripts/torch_index.py          # the driver that runs here
    python scripts/torch_index.py 535      # a given one

PyTorch on PyPI is built for CUDA 13, whose first driver is 580. Drivers from 525 run what is built for CUDA 12; for
older ones there is no build: the workers are on the CPU then, and this says so. Needs no package.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_INDEX = "https://download.pytorch.org/whl/"
_VERSION_FILE = Path("/proc/driver/nvidia/version")
_CUDA_13, _CUDA_12 = 580, 525
"""First drivers. Source: CUDA Toolkit release notes, minor version compatibility."""


def driver_of(text: str) -> int | None:
    """Returns the first number of the driver's version, from what the kernel module says of itself."""
    found = re.search(r"Kernel Module.*?\s(\d+)\.\d+", text)
    return int(found[1]) if found else None


def index_for(driver: int | None) -> str:
    """Returns the index for a driver; empty where pip's own will do."""
    if driver is None or driver >= _CUDA_13:
        return ""
    return _INDEX + ("cu126" if driver >= _CUDA_12 else "cpu")


def main(arguments: list[str]) -> int:
    """Prints the index; warns of a driver for which there is no build."""
    if arguments:
        driver: int | None = int(arguments[0].partition(".")[0])
    else:
        try:
            driver = driver_of(_VERSION_FILE.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            driver = None
    if driver is not None and driver < _CUDA_12:
        print(
            f"the GPU driver here, {driver}, is older than {_CUDA_12}: no PyTorch that moreh_ap accepts runs with it.\n"
            "The workers will be on the CPU. Install a newer driver to use the GPUs.",
            file=sys.stderr,
        )
    print(index_for(driver))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
