"""Models that would talk to other processes by themselves.

Decides what they find: in a worker a forward that looks at rows together gets the unsplit batch (`split_check.py`), so
the statistics of the rows that are here are those of one device. Must not know plans or batches.

[Note: who sees the group]
Models, and libraries in them, ask `torch.distributed` whether there are other processes, and reduce over them if so
(`nn.SyncBatchNorm`, losses of transformers). In a worker these functions answer what they would answer in the script's
process: it is alone. We, and PyTorch's own collectives, ask `torch.distributed.distributed_c10d`, which defines the
functions, and get the group. Code of PyTorch that asks `torch.distributed` on our behalf is called inside
`seeing_group`. Nothing is decided by who calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from moreh_ap.patching import Patches

ALONE = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
"""The answers of a process without others, by the name of the function in `torch.distributed`."""

_SEES_GROUP: ContextVar[bool] = ContextVar("moreh_ap.sees_group", default=False)


def install(patches: Patches) -> None:
    """Have this process answer to models as the script's would, which is one process."""
    group = patches.group("Libraries reduce over processes where there are several; the script is one process.")
    for name, answer in ALONE.items():
        original = getattr(distributed_c10d, name)
        group.replace(dist, name, _answering(original, answer), f"{answer}, except inside `seeing_group`.")


def _answering(original: Callable[..., Any], answer: object) -> Callable[..., Any]:
    @functools.wraps(original)
    def ask(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _SEES_GROUP.get() else answer

    return ask


@contextmanager
def seeing_group() -> Iterator[None]:
    """Inside, `torch.distributed` answers for the workers' process group."""
    token = _SEES_GROUP.set(True)
    try:
        yield
    finally:
        _SEES_GROUP.reset(token)
