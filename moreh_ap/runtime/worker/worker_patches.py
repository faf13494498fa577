"""Every change that a worker makes in other libraries, in the order in which the modules make them."""

from __future__ import annotations

from moreh_ap.integrations import keras_worker, transformers_worker
from moreh_ap.parallelizer.data import unused_parameters
from moreh_ap.parallelizer.loss import chunked_cross_entropy, postponed_mean
from moreh_ap.parallelizer.rng import common_seeds
from moreh_ap.parallelizer.surroundings import dense_gradients, own_collectives, unseen_gathers
from moreh_ap.patching import Patches
from moreh_ap.protocol import process_flags, pytree
from moreh_ap.protocol.script_code import written_files
from moreh_ap.runtime import shared_gpu
from moreh_ap.runtime.worker_environment import workers_per_gpu


def install() -> Patches:
    """Make them, and return the registry that takes them back."""
    patches = Patches()
    pytree.install(patches)
    process_flags.install(patches)
    transformers_worker.install(patches)
    transformers_worker.note_recorded(patches)
    keras_worker.install(patches)
    own_collectives.install(patches)
    dense_gradients.install(patches)
    unused_parameters.install(patches)
    unseen_gathers.install(patches)
    chunked_cross_entropy.install(patches)
    postponed_mean.install(patches)
    common_seeds.install(patches)
    written_files.install(patches)
    if workers_per_gpu() > 1:
        shared_gpu.install(patches)
    return patches
