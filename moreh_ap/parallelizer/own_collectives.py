"""Layers that would talk to other processes by themselves.

Decides what they do instead: in a worker a batch that rows of are looked at together is whole (`proof.py`), so the
statistics of the rows that are here are those of one device. Must not know plans or batches.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _BatchNormOfAnyDims(_BatchNorm):
    """What `nn.SyncBatchNorm` computes in one process."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Takes what `nn.SyncBatchNorm` takes."""


def keep_to_own_rows(module: nn.Module) -> None:
    """Makes every `nn.SyncBatchNorm` in the module normalise over what it is given, and nothing else."""
    for part in module.modules():
        if type(part) is nn.SyncBatchNorm:
            part.__class__ = _BatchNormOfAnyDims  # type: ignore[assignment]
