"""A worker's device: where tensors are put, and what it says of its memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
from torch import Tensor

from moreh_ap.hosts.host_report import running_system
from moreh_ap.local.memory_limit import memory_limit
from moreh_ap.protocol.messages.devices import DeviceInfo, ReportMemory
from moreh_ap.protocol.messages.tensors import TensorData
from moreh_ap.runtime.gpu_checks import check_worker_s_device


class WorkerDevice:
    """The one device of this worker."""

    def __init__(self, rank: int, world_size: int, device_type: str) -> None:
        self.rank, self.world_size = rank, world_size
        if device_type == "cuda":
            check_worker_s_device()
        self.torch_device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else _CPU
        self._start_bytes = 0 if self.is_cuda else _resident_bytes("VmRSS")

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def place(self, data: TensorData) -> Tensor:
        """The tensor on the device, or in host memory where the script passed it from there."""
        return data.on(self.torch_device)

    def describe(self) -> DeviceInfo:
        """Name, memory and whether bfloat16 is computed by the hardware itself."""
        if self.is_cuda:
            properties = torch.cuda.get_device_properties(self.torch_device)
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            free, total = torch.cuda.mem_get_info()
            others = max(0, total - free - torch.cuda.memory_reserved() - _CONTEXT_BYTES)
            return DeviceInfo(properties.name, properties.total_memory, native, held_by_others_bytes=others)
        return DeviceInfo(
            "CPU",
            memory_limit() // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)),
            _cpu_computes_bf16(),
            torch.get_num_threads(),
            len(os.sched_getaffinity(0)),
            machine=running_system(),
        )

    def memory(self, command: ReportMemory) -> dict[str, int]:
        """Bytes ``allocated``, ``peak``, ``free``, ``total``; on a CPU the worker's resident memory since its start."""
        if command.empty_cache:
            gc.collect()
        if self.is_cuda:
            return self._cuda_memory(command)
        if command.reset_peak:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; Source: proc(5), clear_refs
        allocated = max(0, _resident_bytes("VmRSS") - self._start_bytes)
        peak = max(allocated, _resident_bytes("VmHWM") - self._start_bytes)
        total = self.describe().memory_bytes
        return {"allocated": allocated, "peak": peak, "free": max(0, total - allocated), "total": total}

    def _cuda_memory(self, command: ReportMemory) -> dict[str, int]:
        if command.empty_cache:
            torch.cuda.empty_cache()
        if command.reset_peak:
            torch.cuda.reset_peak_memory_stats()
        free, total = torch.cuda.mem_get_info()
        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        return {"allocated": allocated, "peak": peak, "free": free, "total": total}

    def peak_reserved_bytes(self) -> int:
        """What the allocator held at most; on a CPU the worker's resident memory beyond that at its start."""
        if self.is_cuda:
            return torch.cuda.max_memory_reserved()
        return max(0, _resident_bytes("VmHWM") - self._start_bytes)

    def give_back(self, *, is_start: bool) -> None:
        """Gives the memory of tensors that are gone back to the device, after tries of other sizes than steps have.

        Args:
            is_start: Whether no step has run yet, so that peaks count from here.
        """
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()
            if is_start:
                torch.cuda.reset_peak_memory_stats()

    def synchronize(self) -> None:
        """Wait for the device's queue."""
        if self.is_cuda:
            torch.cuda.synchronize()


_CPU = torch.device("cpu")
_CONTEXT_BYTES = 1 << 30
"""At most what CUDA, NCCL and cuBLAS of this process hold on a device beside the tensors."""


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_computes_bf16() -> bool:
    """True for CPUs with instructions for bfloat16 matrix products (AVX512_BF16, AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
