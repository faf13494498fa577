"""Seeds that a forward takes from the system: those of all workers are one.

Decides what `torch.seed()` gives in a worker, and notes that it was called: on one device nobody knows the random
numbers that follow, in the forward and after a backward that sets such a seed again (the reversible layers of
Reformer). Must not know models.
"""

from __future__ import annotations

import hashlib

import torch

from moreh_ap.patching import Patches

TAKEN: list[int] = []
"""The seeds that were taken since somebody last looked."""


def install(patches: Patches) -> None:
    """Makes the change."""
    group = patches.group("Workers that share a batch draw the same random numbers.")
    for module in (torch, torch.random):
        group.replace(module, "seed", seed)


def seed() -> int:
    """Seeds the stream with a number that follows from where it is, which is the same on every worker."""
    state = torch.default_generator.get_state().numpy().tobytes()
    number = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") % 2**63
    TAKEN.append(number)
    torch.manual_seed(number)
    return number
