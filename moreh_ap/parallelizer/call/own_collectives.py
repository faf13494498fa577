"""Models that would talk to other processes by themselves.

Decides what they do instead: where rows of a batch look at each other, every worker has the whole batch
(`split_check.py`), so the statistics of its rows are those of one device. Must not know plans or batches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
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


_ALONE = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
_KNOW_BETTER = {"torch", "moreh_ap", "monarch"}


def appear_alone() -> None:
    """Has this process answer what models ask `torch.distributed` as the script's would, which is one process.

    Many libraries add up over processes by themselves where there are several. PyTorch and we are told the truth.
    """
    for name, answer in _ALONE.items():
        setattr(dist, name, _answering(getattr(dist, name), answer))


def _answering(original: Callable[..., Any], answer: object) -> Callable[..., Any]:
    @functools.wraps(original)
    def ask(*args: Any, **kwargs: Any) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return original(*args, **kwargs) if asker in _KNOW_BETTER else answer

    return ask
