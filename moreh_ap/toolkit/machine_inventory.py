"""What this machine has: GPUs with their readings, or CPU cores and memory.

Decides how that is found out. Must not know jobs or accelerators. PyTorch is imported only where there may be a GPU: it
says which ones a process would see, and reads them through the driver's management library.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moreh_ap.accelerator_models import Supply
from moreh_ap.local.memory_limit import memory_limit

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, NVIDIA under WSL, AMD


@dataclass(frozen=True)
class Gpu:
    """One GPU, as a process of this user would number it. What cannot be read is None.

    Attributes:
        index: Its number.
        name: Its name.
        total_bytes: Its memory.
        used_bytes: Bytes that all processes together hold.
        utilization: Per cent of the time in which something ran on it.
        temperature: Degrees Celsius.
        power_w: Watts.
        names: What CUDA_VISIBLE_DEVICES may call it: its number in the machine, and the beginning of its UUID.
    """

    index: int
    name: str
    total_bytes: int
    used_bytes: int | None = None
    utilization: float | None = None
    temperature: float | None = None
    power_w: float | None = None
    names: tuple[str, ...] = ()

    def is_called(self, name: str) -> bool:
        """Returns whether `name`, of another process's CUDA_VISIBLE_DEVICES, is this GPU."""
        number, *uuids = self.names or (str(self.index),)
        return name == number or (name.startswith("GPU-") and any(uuid.startswith(name) for uuid in uuids))


@dataclass(frozen=True)
class MachineInventory:
    """The devices, memory and processor of a machine.

    Attributes:
        supply: Kind and number of devices, and memory for CPU workers.
        processor: Name of the CPU.
        gpus: The GPUs, none where workers run on the CPU.
    """

    supply: Supply
    processor: str = ""
    gpus: tuple[Gpu, ...] = ()


def look() -> MachineInventory:
    """Returns what this machine has at this moment."""
    gpus = _gpus() if _may_have_gpus() else ()
    memory = memory_limit()
    if gpus:
        return MachineInventory(Supply("cuda", len(gpus), memory), _processor(), gpus)
    return MachineInventory(Supply("cpu", len(os.sched_getaffinity(0)), memory), _processor())


def _may_have_gpus() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return not hidden and any(os.path.exists(path) for path in _DRIVERS)


def _gpus() -> tuple[Gpu, ...]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Gpu(
                index,
                properties.name,
                properties.total_memory,
                used_bytes=_reading(torch.cuda.device_memory_used, index),
                utilization=_reading(torch.cuda.utilization, index),
                temperature=_reading(torch.cuda.temperature, index),
                power_w=_in_watts(_reading(torch.cuda.power_draw, index)),
                names=_names(index, str(getattr(properties, "uuid", ""))),
            )
        )
    return tuple(found)


def _names(index: int, uuid: str) -> tuple[str, ...]:
    """Returns what a GPU is called that is number `index` of those that this process sees."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    seen_as = visible[index] if index < len(visible) else str(index)
    full = f"GPU-{uuid.removeprefix('GPU-')}" if uuid else ""
    return (seen_as, *([full] if full else []))


def _reading(read: Callable[[int], int], index: int) -> int | None:
    """Returns a reading, None where the management library is not installed or does not know it."""
    try:
        return read(index)
    except Exception:  # of many classes: the library's own, and PyTorch's where there is no library
        return None


def _in_watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
