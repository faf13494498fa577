"""Workers agree on how a trial went, so that all of them take the same way from there.

Decides whose word counts. Must not know what was tried.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_world_size, is_initialized

from moreh_ap.parallelizer.call.call import Call


def everywhere(ok: bool, call: Call) -> bool:
    """Says whether `ok` holds on every worker. A collective."""
    return worst(int(not ok), call) == 0


def worst(number: int, call: Call) -> int:
    """Returns the largest of the workers' numbers. A collective."""
    if not is_initialized() or get_world_size() == 1:
        return number
    largest = torch.tensor(number, device=call.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest.item())
