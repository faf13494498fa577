"""Wrappers and process groups of scripts for several devices: as on one device, or refused where the script makes them.

Decides which are refused, and the text of the errors. Anything that runs in one process is unchanged.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.transfers import require_accelerator
from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches, PatchGroup

_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
}


def install(patches: Patches) -> None:
    """Have `DataParallel` wrap the one device there is; other wrappers, and groups of several processes, refused."""
    group = patches.group("The accelerator is one device that shares the work by itself, and a script is one process.")
    group.when_imported("torch.nn.parallel.data_parallel", functools.partial(_wrap_one_device, group))
    for module, name in _WRAPPERS.items():
        group.when_imported(module, functools.partial(_refuse_wrapper, group, name=name))
    # `fully_shard` is imported by name: its first step is looked up when it is called.
    fully_shard = "torch.distributed.fsdp._fully_shard._fully_shard"
    group.when_imported(fully_shard, functools.partial(_refuse_fully_shard, group))
    group.when_imported("torch.utils.data.distributed", functools.partial(_refuse_sampler_without_group, group))
    if torch.distributed.is_available():
        _refuse_process_groups(group)


def _wrap_one_device(group: PatchGroup, module: ModuleType) -> None:
    """Has `DataParallel` call its module and nothing else, as it does where it finds no device to share with."""
    cls: Any = module.DataParallel

    def init(
        self: nn.Module, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0
    ) -> None:
        for device in (*(device_ids or ()), *(() if output_device is None else (output_device,))):
            require_accelerator(device)
        original(self, module, device_ids, output_device, dim)
        module.to("cuda")

    wrapper = functools.wraps(cls.__init__)(init)
    original = group.replace(cls, "__init__", wrapper, "Moves the module to the accelerator and wraps that one device.")
    group.replace(module, "_get_available_device_type", _no_type)


def _no_type() -> None:
    """None: there are no devices to scatter a batch to."""


def _refuse_wrapper(group: PatchGroup, module: ModuleType, name: str) -> None:
    cls: Any = getattr(module, name)

    @functools.wraps(cls.__init__)
    def init(self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        _refuse(module, name, f"{name}(model)")
        original(self, module, *args, **kwargs)

    original = group.replace(cls, "__init__", init, "Refuses to wrap a module on the accelerator.")


def _refuse_fully_shard(group: PatchGroup, module: ModuleType) -> None:
    def validate_module(modules: Any, func_name: str) -> None:
        """Refuses `fully_shard` of a module on the accelerator."""
        for root in modules if isinstance(modules, (list, tuple)) else [modules]:
            _refuse(root, "fully_shard", "fully_shard(model)")
        original(modules, func_name)

    original: Callable[..., None] = group.replace(module, "_validate_module", validate_module)


def _refuse(module: nn.Module, name: str, line: str) -> None:
    if any(isinstance(parameter, VirtualTensor) and parameter.is_cuda for parameter in module.parameters()):
        raise UnsupportedError(
            f"{name} around a {type(module).__name__} on the accelerator, which is one device and shares the work by "
            "itself.",
            allowed="The model alone; its batch is the global batch.",
            fix=f"model  # in place of {line}; model.module becomes model",
            link="docs/limits.md#plans-and-machines",
        )


def _refuse_sampler_without_group(group: PatchGroup, module: ModuleType) -> None:
    cls: Any = module.DistributedSampler

    @functools.wraps(cls.__init__)
    def init(
        self: Any, dataset: Any, num_replicas: int | None = None, rank: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if None in (num_replicas, rank) and not (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        ):
            raise UnsupportedError(
                "DistributedSampler asks a process group which rows are its own: with the one line a script is one "
                "process, which draws the rows of all devices.",
                allowed="No sampler; the batch size of the loader is that of all devices together.",
                fix="DataLoader(dataset, batch_size=batch_size, shuffle=True)  # without sampler.set_epoch(epoch) too",
                link="docs/limits.md#plans-and-machines",
            )
        original(self, dataset, num_replicas, rank, *args, **kwargs)

    original = group.replace(cls, "__init__", init, "Refuses a sampler that asks a process group that is not there.")


def _refuse_process_groups(group: PatchGroup) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    @functools.wraps(dist.init_process_group)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("world_size", -1)
        world_size = int(os.environ.get("WORLD_SIZE", "1")) if asked in (-1, None) else asked
        by_environment = kwargs.get("store") is None and kwargs.get("init_method") in (None, "env://")
        lacks = by_environment and not all(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT"))
        if world_size > 1 or "nccl" in str(backend) or lacks:
            raise UnsupportedError(
                f"init_process_group({backend!r}) for {world_size} process(es): with the one line a script is one "
                "process, and the workers have a group of their own.",
                allowed="No process group; or backend='gloo' with world_size=1, rank=0 and an init_method. Where a "
                "library's trainer makes the group: its strategy for one device.",
                fix="# delete init_process_group, DistributedSampler and DistributedDataParallel; start with python",
                link="docs/limits.md#plans-and-machines",
            )
        original(backend, *args, **kwargs)

    effect = "Refuses a group of several processes."
    original = group.replace(distributed_c10d, "init_process_group", init_process_group, effect)
    group.replace(dist, "init_process_group", init_process_group, effect)
