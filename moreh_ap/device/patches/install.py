"""Every change that the one line makes in other libraries for the device, subject by subject.

`integrations` adds the changes in transformers and Accelerate to the same registry.
"""

from __future__ import annotations

import functools

from moreh_ap.device import tensor_classes, wrapped_tensors
from moreh_ap.device.cuda import cuda_functions, cuda_generator, cuda_rng, cuda_streams, cudnn, legacy_types
from moreh_ap.device.host_tensors import HOST
from moreh_ap.device.patches import (
    compiling,
    data_loading,
    export,
    modules,
    multi_device,
    native_calls,
    optimizer_steps,
    process_sharing,
    profilers,
    serialization,
    sparse_adam,
    threads,
)
from moreh_ap.device.worker_backend import IN_FORCE, WorkerBackend
from moreh_ap.local import interrupts
from moreh_ap.patching import Patches
from moreh_ap.protocol import pytree


def install(backend: WorkerBackend) -> Patches:
    """Makes "cuda" mean the accelerator of `backend` in this process."""
    patches = Patches()
    IN_FORCE.backend = backend
    patches.on_undo(_leave_force)
    pytree.install(patches)
    threads.install(patches)
    patches.group("An interrupt in the middle of one of our functions would leave half of its work.").note(
        "signal.SIGINT",
        "Has Ctrl-C be raised once our functions have returned, or where they wait.",
        interrupts.install(),
    )
    cuda_functions.install(patches, backend)
    cuda_streams.install(patches, backend)
    cuda_rng.install(patches, backend)
    cuda_generator.install(patches)
    legacy_types.install(patches)
    cudnn.install(patches)
    data_loading.install(patches)
    process_sharing.install(patches)
    serialization.install(patches)
    multi_device.install(patches)
    sparse_adam.install(patches)
    export.install(patches)
    compiling.install(patches, backend)
    profilers.install(patches)
    wrapped_tensors.install(patches)
    tensor_classes.install(patches)
    native_calls.install_transforms(patches)
    HOST.prepare = functools.partial(native_calls.install, patches)
    modules.install(patches, backend)
    optimizer_steps.install(patches, backend)
    return patches


def _leave_force() -> None:
    IN_FORCE.backend = None
    HOST.end()
