"""Whether the GPUs of this machine can be used, found out before anything fails in their libraries.

Decides what is refused, and the text of the errors. The script's process asks without making a context on a device;
what needs one is asked in a worker.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

import torch

from moreh_ap.errors import OptionError, UnsupportedError

_LINK = "docs/gpu.md#errors"
_MINIMUM_DRIVERS = {12: "525", 13: "580"}
"""The first driver of each major version of CUDA. Source: CUDA Toolkit release notes, minor version compatibility."""
_OLDER_BUILD = "cu126"
"""The build of PyTorch for drivers of CUDA 12."""


def check_script_process() -> None:
    """Looks at the GPUs from the script's process, which makes no context on them.

    Raises:
        OptionError: The driver is too old for this build of PyTorch.
        UnsupportedError: The script has put tensors on a GPU already.
    """
    if torch.version.cuda is not None:
        check_driver(driver_version(), torch.version.cuda)
    if torch.cuda.is_initialized():
        check_nothing_is_there([torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())])


def driver_version() -> int:
    """Returns the latest CUDA that the driver supports: 12020 is 12.2; 0 if there is no driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # the library comes with the driver
        return 0
    return version.value


def check_driver(supported: int, built_for: str) -> None:
    """Compares the driver with the version of CUDA that PyTorch was built for: the first numbers have to be equal.

    Args:
        supported: As `driver_version` says it.
        built_for: The version that PyTorch was built for: "13.0".

    Raises:
        OptionError: The driver is older.
    """
    major = int(built_for.partition(".")[0])
    if not 0 < supported // 1000 < major:
        return
    supports = f"{supported // 1000}.{supported % 1000 // 10}"
    older = supported // 1000 >= min(_MINIMUM_DRIVERS)
    raise OptionError(
        f"The driver here supports CUDA {supports}, and PyTorch {torch.__version__} was built for CUDA {built_for}.",
        allowed=f"Driver {_MINIMUM_DRIVERS.get(major, 'of that version')} or later"
        + (f", or a PyTorch built for CUDA {supported // 1000}." if older else "."),
        fix=f"pip install torch --index-url https://download.pytorch.org/whl/{_OLDER_BUILD}"
        if older
        else "CUDA_VISIBLE_DEVICES= python ...  # CPU workers",
        link=_LINK,
    )


def check_nothing_is_there(allocated_bytes: Sequence[int]) -> None:
    """Refuses a script whose process has tensors on GPUs: they are no tensors of the accelerator.

    Args:
        allocated_bytes: Of each device that this process sees.

    Raises:
        UnsupportedError: There are some.
    """
    for index, num_bytes in enumerate(allocated_bytes):
        if num_bytes:
            raise UnsupportedError(
                f"{num_bytes / 2**20:.1f} MiB of tensors are on cuda:{index} already: what moved there before the line "
                "is not on the accelerator.",
                allowed='The line before the first .cuda() or device="cuda".',
                fix="torch.moreh.option.enable_advanced_parallelization()  # right behind import torch",
                link=_LINK,
            )


def check_worker_s_device() -> None:
    """Looks at the device of this worker.

    Raises:
        UnsupportedError: This build of PyTorch has no code for it.
    """
    check_architecture(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.get_arch_list())


def check_architecture(name: str, capability: tuple[int, int], built_for: Sequence[str]) -> None:
    """Compares a device with what PyTorch was built for.

    Code for an architecture runs on devices of the same first number and a second one that is not lower; PTX, which is
    called compute, on all later ones.

    Args:
        name: The device's name.
        capability: Its architecture: (9, 0).
        built_for: As `torch.cuda.get_arch_list` says it: ["sm_80", "sm_90a", "compute_90"].

    Raises:
        UnsupportedError: No code is for it.
    """
    found = [match for match in (re.match(r"(sm|compute)_(\d+)(\d)", one) for one in built_for) if match]
    runs = [
        (int(major), int(minor)) <= capability and (kind == "compute" or int(major) == capability[0])
        for kind, major, minor in (match.groups() for match in found)
    ]
    if any(runs) or not found:
        return
    raise UnsupportedError(
        f"PyTorch {torch.__version__} has no code for {name}, whose architecture is sm_{capability[0]}{capability[1]}.",
        allowed=f"Devices of {', '.join(built_for)}, or a PyTorch built for this one.",
        fix=f"pip install torch --index-url https://download.pytorch.org/whl/{_OLDER_BUILD}"
        if capability < (7, 5)
        else "CUDA_VISIBLE_DEVICES= python ...  # CPU workers",
        link=_LINK,
    )
