"""What scripts for several devices have around a model: as on one device, or explained where the script calls it.

Decides which of it is refused, and what the script's author reads. What runs in one process stays as it is.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from moreh_ap.device.patches.registry import Patches
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.transfers import require_accelerator
from moreh_ap.errors import UnsupportedError
from moreh_ap.import_hook import when_imported

_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
}


def install(patches: Patches) -> None:
    """Have `DataParallel` wrap the one device there is; other wrappers, and groups of several processes, refused."""
    data_parallel = "torch.nn.parallel.data_parallel"
    patches.on_undo(when_imported(data_parallel, functools.partial(_wrap_one_device, patches)))
    for module, name in _WRAPPERS.items():
        patches.on_undo(when_imported(module, functools.partial(_refuse_wrapper, patches, name=name)))
    # `fully_shard` is imported by name: its first step is looked up when it is called.
    fully_shard = "torch.distributed.fsdp._fully_shard._fully_shard"
    patches.on_undo(when_imported(fully_shard, functools.partial(_refuse_fully_shard, patches)))
    _refuse_lazy_adam(patches)
    if torch.distributed.is_available():
        _refuse_process_groups(patches)


def _wrap_one_device(patches: Patches, module: ModuleType) -> None:
    """Has `DataParallel` call its module and nothing else, as it does where it finds no device to share with."""
    cls: Any = module.DataParallel

    def init(
        self: nn.Module, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0
    ) -> None:
        for device in (*(device_ids or ()), *(() if output_device is None else (output_device,))):
            require_accelerator(device)
        original(self, module, device_ids, output_device, dim)
        module.to("cuda")

    original = patches.replace(cls, "__init__", functools.wraps(cls.__init__)(init))
    patches.replace(module, "_get_available_device_type", lambda: None)


def _refuse_wrapper(patches: Patches, module: ModuleType, name: str) -> None:
    cls: Any = getattr(module, name)

    @functools.wraps(cls.__init__)
    def init(self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        _refuse(module, name, f"{name}(model)")
        original(self, module, *args, **kwargs)

    original = patches.replace(cls, "__init__", init)


def _refuse_fully_shard(patches: Patches, module: ModuleType) -> None:
    def validate_module(modules: Any, func_name: str) -> None:
        for root in modules if isinstance(modules, (list, tuple)) else [modules]:
            _refuse(root, "fully_shard", "fully_shard(model)")
        original(modules, func_name)

    original: Callable[..., None] = patches.replace(module, "_validate_module", validate_module)


def _refuse(module: nn.Module, name: str, line: str) -> None:
    if any(isinstance(parameter, VirtualTensor) and parameter.is_cuda for parameter in module.parameters()):
        raise UnsupportedError(
            f"{name} around a {type(module).__name__} on the accelerator, which is one device and shares the work by "
            "itself.",
            allowed="The model alone; its batch is the global batch.",
            fix=f"model  # in place of {line}; model.module becomes model",
            link="docs/limits.md#plans-and-machines",
        )


def _refuse_lazy_adam(patches: Patches) -> None:
    cls = torch.optim.SparseAdam

    @functools.wraps(cls.step)
    def step(optimizer: torch.optim.SparseAdam, closure: Callable[[], Any] | None = None) -> Any:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if any(isinstance(parameter, VirtualTensor) and parameter.is_cuda for parameter in parameters):
            raise UnsupportedError(
                "SparseAdam needs to know which rows of an embedding a batch used; gradients on the accelerator are "
                "dense.",
                allowed="Optimizers that take dense gradients; to SGD and Adagrad they are as good as sparse ones.",
                fix="torch.optim.Adagrad(parameters, lr=...)",
                link="docs/limits.md#models",
            )
        return original(optimizer, closure)

    original = patches.replace(cls, "step", step)


def _refuse_process_groups(patches: Patches) -> None:
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
                allowed="No process group; or backend='gloo' with world_size=1, rank=0 and an init_method.",
                fix="# delete init_process_group, DistributedSampler and DistributedDataParallel; start with python",
                link="docs/limits.md#plans-and-machines",
            )
        original(backend, *args, **kwargs)

    original = patches.replace(distributed_c10d, "init_process_group", init_process_group)
    patches.replace(dist, "init_process_group", init_process_group)


def refuse_compiled(root: nn.Module) -> None:
    """Models of TorchScript have no code that workers could run.

    Raises:
        UnsupportedError: There is one in the module.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in root.modules()):
        raise UnsupportedError(
            f"A {type(root).__name__} compiled by torch.jit on the accelerator, whose workers run Python.",
            allowed="The model itself on the accelerator; compiled models on the CPU; compiled functions anywhere.",
            fix="torch.jit.script(copy.deepcopy(model).cpu())  # to save it; train the model itself",
        )
