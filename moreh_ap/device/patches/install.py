"""Every change that the one line makes to other people's modules in the controller, subject by subject."""

from __future__ import annotations

import torch

from moreh_ap.device import legacy_types
from moreh_ap.device.patches import (
    cuda_streams,
    data_loading,
    export,
    modules,
    optimizers,
    profilers,
    serialization,
    tensors,
    threads,
    unsupported,
)
from moreh_ap.device.patches.cuda import Facade
from moreh_ap.device.patches.cuda_rng import RandomState
from moreh_ap.device.patches.registry import FORK_HOOK, Patches
from moreh_ap.device.worker_backend import IN_FORCE, WorkerBackend


def install(backend: WorkerBackend) -> Patches:
    """Make "cuda" mean the accelerator behind `backend` in this process."""
    patches = Patches()
    _put_in_force(patches, backend)
    threads.install(patches)
    _redirect_cuda(patches, backend)
    tensors.install(patches)
    data_loading.install(patches)
    serialization.install(patches)
    unsupported.install(patches)
    export.install(patches)
    profilers.install(patches)
    modules.install(patches, backend)
    optimizers.install(patches, backend)
    FORK_HOOK.current = patches
    return patches


def _put_in_force(patches: Patches, backend: WorkerBackend) -> None:
    IN_FORCE.backend = backend

    def remove() -> None:
        IN_FORCE.backend = None

    patches.on_undo(remove)


def _redirect_cuda(patches: Patches, backend: WorkerBackend) -> None:
    """Have `torch.cuda` and `torch.accelerator` answer for the accelerator."""
    facade = Facade(backend)
    own_streams = cuda_streams.replacements(backend)
    random_state = RandomState(backend).replacements()
    for holder, functions in (
        (torch.cuda, {**facade.replacements(), **own_streams, **random_state}),
        (torch.cuda.random, random_state),
        (torch.cuda.memory, facade.memory_replacements()),
        (torch.cuda, legacy_types.replacements()),
        (torch.accelerator, {**facade.accelerator_replacements(), "current_stream": own_streams["current_stream"]}),
    ):
        for name, function in functions.items():
            if hasattr(holder, name):  # later versions of PyTorch have more of them
                patches.replace(holder, name, function)
    patches.replace(torch.cuda, "_lazy_init", lambda: None)
