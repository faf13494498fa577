"""`torch.cuda` as a script sees it: one device named 'MoAI Accelerator' that is all devices together.

Every method of `Facade` replaces the function of `torch.cuda` with the same name, and some replace functions of
`torch.accelerator`, with which PyTorch itself asks for the device (a DataLoader that pins memory does). None of them
creates a CUDA context in the controller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from moreh_ap.device.tensor import ACCELERATOR
from moreh_ap.device.transfers import require_accelerator
from moreh_ap.device.worker_backend import WorkerBackend
from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches

DEVICE_NAME = "MoAI Accelerator"

# Names in `torch.accelerator`, and the function of the facade that replaces each.
_IN_TORCH_ACCELERATOR = {
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "synchronize": "synchronize",
    "empty_cache": "empty_cache",
    "get_memory_info": "mem_get_info",
    "memory_stats": "memory_stats",
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "memory_reserved": "memory_reserved",
    "max_memory_reserved": "max_memory_reserved",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "reset_accumulated_memory_stats": "reset_accumulated_memory_stats",
}


@dataclass(frozen=True)
class DeviceProperties:
    """The result of `torch.cuda.get_device_properties`; `total_memory` is in bytes, over all devices."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int


def install(patches: Patches, backend: WorkerBackend) -> None:
    """Have `torch.cuda` and `torch.accelerator` answer for the accelerator."""
    group = patches.group("The controller has no CUDA context, and PyTorch may have been built without CUDA.")
    facade = Facade(backend)
    functions = {name: getattr(facade, name) for name in vars(Facade) if not name.startswith("_")}
    group.replace_all(torch.cuda, functions)
    defined = torch.cuda.memory.__all__  # beside what that module imports for itself
    group.replace_all(torch.cuda.memory, {name: ours for name, ours in functions.items() if name in defined})
    group.replace_all(torch.accelerator, {name: functions[ours] for name, ours in _IN_TORCH_ACCELERATOR.items()})
    group.replace(torch.accelerator, "current_accelerator", _current_accelerator)
    group.replace(torch.cuda, "_lazy_init", _refuse_initialization)
    for name in ("_exchange_device", "_maybe_exchange_device"):  # ``with torch.cuda.device(0)``
        group.replace(torch.cuda, name, _exchange_device)


def _current_accelerator(check_available: bool = False) -> torch.device:
    """`torch.device("cuda")`."""
    return torch.device(ACCELERATOR.type)


def _refuse_initialization() -> NoReturn:
    """Refuses a CUDA context in this process, which would be one of the first device alone."""
    raise UnsupportedError(
        "This call needs a CUDA context in the script's process, which has none: the devices belong to the workers.",
        allowed="Tensors and modules on the accelerator; what torch.cuda says of devices, memory, streams and draws.",
        fix="moreh_ap.device.disable()  # from here on, cuda means the GPU of this process again",
        link="docs/gpu.md#errors",
    )


def _exchange_device(index: int) -> int:
    """The device that was current before: 0, the one of the accelerator, or -1 where `index` asks for no change."""
    if index < 0:
        return -1
    require_accelerator(index)
    return 0


class Facade:
    """The functions that replace those of `torch.cuda`: its public methods, by their names."""

    def __init__(self, backend: WorkerBackend) -> None:
        self._backend = backend

    # -- devices ---------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """True: the accelerator is there."""
        return True

    def is_initialized(self) -> bool:
        """True: nothing needs initialising in the controller."""
        return True

    def init(self) -> None:
        """Nothing to do: workers start by themselves."""

    def device_count(self) -> int:
        """1, whatever the number of devices of the accelerator."""
        return 1

    def current_device(self) -> int:
        """0."""
        return 0

    def set_device(self, device: Any) -> None:
        """Accepts the one device there is."""
        require_accelerator(device)

    def get_device_name(self, device: Any = None) -> str:
        """'MoAI Accelerator'."""
        require_accelerator(device)
        return DEVICE_NAME

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        """Properties of the accelerator as a whole; total memory is that of all devices."""
        require_accelerator(device)
        total = sum(device.memory_bytes for device in self._backend.devices())
        return DeviceProperties(DEVICE_NAME, *self.get_device_capability(), total, self._backend.num_devices)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """(8, 0) where bfloat16 is native, (7, 0) elsewhere: what scripts ask the capability for."""
        require_accelerator(device)
        return (8, 0) if self._computes_bf16() else (7, 0)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """True where bfloat16 is native, and elsewhere if emulation counts."""
        return including_emulation or self._computes_bf16()

    def _computes_bf16(self) -> bool:
        return all(device.native_bf16 for device in self._backend.devices())

    def can_device_access_peer(self, device: Any, peer_device: Any) -> bool:
        """False: there is one device."""
        return False

    # -- order -----------------------------------------------------------------------------------------------------

    def is_current_stream_capturing(self) -> bool:
        """False: graphs are not recorded."""
        return False

    def set_sync_debug_mode(self, debug_mode: int | str) -> None:
        """Accepted without effect: no warning says where the script waits for the devices."""

    def get_sync_debug_mode(self) -> int:
        """Returns 0: no warning says where the script waits."""
        return 0

    def synchronize(self, device: Any = None) -> None:
        """Waits until every device has executed all commands."""
        require_accelerator(device)
        self._backend.synchronize()

    # -- memory ------------------------------------------------------------------------------------------------------

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes of tensors over all devices (CPU workers: resident memory beyond their start)."""
        require_accelerator(device)
        return self._backend.memory()["allocated"]

    def max_memory_allocated(self, device: Any = None) -> int:
        """The sum of the devices' peaks of `memory_allocated`, in bytes, since the start or the last reset."""
        require_accelerator(device)
        return self._backend.memory()["peak"]

    def memory_reserved(self, device: Any = None) -> int:
        """Bytes that are not free, over all devices."""
        require_accelerator(device)
        report = self._backend.memory()
        return max(report["allocated"], report["total"] - report["free"])

    def max_memory_reserved(self, device: Any = None) -> int:
        """The larger of `memory_reserved` and `max_memory_allocated`, in bytes."""
        return max(self.memory_reserved(device), self.max_memory_allocated(device))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Start counting peaks anew."""
        require_accelerator(device)
        self._backend.memory(reset_peak=True)

    def reset_max_memory_allocated(self, device: Any = None) -> None:
        """The old name of `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """The entries of `torch.cuda.memory_stats` that scripts print, over all devices, in bytes."""
        require_accelerator(device)
        report = self._backend.memory()
        reserved = max(report["allocated"], report["total"] - report["free"])
        return {
            "allocated_bytes.all.current": report["allocated"],
            "allocated_bytes.all.peak": report["peak"],
            "reserved_bytes.all.current": reserved,
            "reserved_bytes.all.peak": max(reserved, report["peak"]),
            "num_ooms": 0,
        }

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        """`memory_stats` as lines to print."""
        return "\n".join(f"{name:32} {value:>18,}" for name, value in self.memory_stats(device).items())

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """(free, total) bytes over all devices."""
        require_accelerator(device)
        report = self._backend.memory()
        return report["free"], report["total"]

    def empty_cache(self) -> None:
        """Give cached memory of every device back."""
        self._backend.empty_cache()

    def memory_cached(self, device: Any = None) -> int:
        """The old name of `memory_reserved`."""
        return self.memory_reserved(device)

    def max_memory_cached(self, device: Any = None) -> int:
        """The old name of `max_memory_reserved`."""
        return self.max_memory_reserved(device)

    def reset_max_memory_cached(self, device: Any = None) -> None:
        """An old name of `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device)

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        """Nothing to do: no sums over time are kept."""
        require_accelerator(device)

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """Accepted; what a plan may use of each device's memory says the memory ratio of the options."""
        require_accelerator(device)

    def get_allocator_backend(self) -> str:
        """'native'."""
        return "native"

    def ipc_collect(self) -> None:
        """Nothing to do: no memory is shared with other processes."""
