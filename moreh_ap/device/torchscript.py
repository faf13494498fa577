"""TorchScript models, which have no Python code that workers could run."""

from __future__ import annotations

import torch
from torch import nn

from moreh_ap.errors import UnsupportedError


def refuse_compiled(root: nn.Module) -> None:
    """Raises for a model with TorchScript modules.

    Raises:
        UnsupportedError: `root` or a module in it was compiled by `torch.jit`.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in root.modules()):
        raise UnsupportedError(
            f"A {type(root).__name__} compiled by torch.jit on the accelerator, whose workers run Python.",
            allowed="The model itself on the accelerator; compiled models on the CPU; compiled functions anywhere.",
            fix="torch.jit.script(copy.deepcopy(model).cpu())  # to save it; train the model itself",
        )
