"""What this worker's device and the links between workers really do, measured in about a second.

Decides what is run to find out. Must not know what the figures are used for. All workers measure at the same time: CPU
workers share cores, caches and memory, and what each of them has while the others compute is what counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from moreh_ap.runtime.messages import DeviceRates

_LONG, _SHORT = {"cpu": 1024, "cuda": 8192}, 64
_SMALL_ELEMENTS, _LARGE_ELEMENTS = 256, 1 << 20
_AT_LEAST_S = 0.1
_MOST_ROUNDS = 200


def measure(device: torch.device, bf16: bool) -> DeviceRates:
    """Returns the rates of this device. A collective of all workers.

    Args:
        device: Where to compute.
        bf16: Whether products in bfloat16 are worth measuring.
    """
    long, short = _LONG[device.type], _SHORT
    dtypes = {"fp32": torch.float32, **({"bf16": torch.bfloat16} if bf16 else {})}
    products = {
        name: {
            (tokens, width): _product_flops_per_s(tokens, width, dtype, device)
            for tokens, width in ((long, long), (short, long), (long, short))
        }
        for name, dtype in dtypes.items()
    }
    source = torch.ones(16 << 20, device=device)
    target = torch.empty_like(source)
    copy_s = _seconds(lambda: target.copy_(source), device)
    small_s = large_s = 0.0
    if dist.is_initialized() and dist.get_world_size() > 1:
        small_s, large_s = (_sum_s(elements, device) for elements in (_SMALL_ELEMENTS, _LARGE_ELEMENTS))
    return DeviceRates(
        products=products,
        memory_bytes_per_s=2 * source.nbytes / copy_s,
        small_sum_bytes=4 * _SMALL_ELEMENTS,
        small_sum_s=small_s,
        large_sum_bytes=4 * _LARGE_ELEMENTS,
        large_sum_s=large_s,
    )


def _product_flops_per_s(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> float:
    left = torch.ones(tokens, width, dtype=dtype, device=device)
    right = torch.ones(width, width, dtype=dtype, device=device)
    return 2.0 * tokens * width * width / _seconds(lambda: left @ right, device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the least time of a run, of as many as it takes to know: what else the machine does only adds to it."""
    run()  # the first one allocates, and finds its kernel
    found: list[float] = []
    while (sum(found) < _AT_LEAST_S and len(found) < _MOST_ROUNDS) or len(found) < 3:
        found.append(_timed(run, device))
    return min(found)


def _sum_s(elements: int, device: torch.device) -> float:
    """Returns the least time of a sum over all workers; every worker runs it as often as the others."""
    values = torch.ones(elements, device=device)
    dist.all_reduce(values)
    found = [_timed(lambda: dist.all_reduce(values), device) for _ in range(11)]
    return min(found)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    started_s = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started_s
