"""What was compiled by `torch.compile` runs as it is written, in the controller and in workers.

Decides that for a process. Must not know who compiled what. In the controller compiled code would find no entries in
tensors; in a worker it would have been made for other surroundings (torch function modes) than those of the next call.
"""

from __future__ import annotations

import torch

from moreh_ap.patching import Patches, PatchGroup


def run_as_written(group: PatchGroup) -> None:
    """Makes PyTorch run compiled functions as they are written. Imports the compiler."""
    stance = torch.compiler.set_stance("force_eager")
    group.note(
        "torch.compiler.set_stance",
        "Runs what was compiled as it is written.",
        lambda: stance.__exit__(None, None, None),  # as at the end of a `with` block
    )


def install(patches: Patches) -> None:
    """Does that once a model brings the compiler along."""
    group = patches.group("compiled code would be made for surroundings that the next call does not have")
    group.when_imported("torch._dynamo", lambda _: run_as_written(group))
