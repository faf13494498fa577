"""What this worker's device and the links between workers really do, measured in seconds.

Decides what is run to find out how fast a device computes; `probe_exchanges.py` does the links. Must not know what the
figures are used for.

[Note: how time is taken]
All workers measure the same at the same time: CPU workers share caches and memory, and what each of them has while the
others compute is what counts. What a CPU worker computes is timed by the seconds that its thread had a core, so that
neither other programs nor workers that wait for the same core come into it.

A GPU that had nothing to do clocks low, and takes some tenths of a second of work to clock high. So it works for
`_WARM_UP_S` first. Then so many runs are started one after another that a series takes long enough, and are waited for
at its end alone: a training step does not wait for its kernels either.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import is_initialized

from moreh_ap.protocol.messages.devices import DeviceRates
from moreh_ap.runtime.worker.probe_exchanges import measure_between, measure_exchanges

_LONG, _SHORT = {"cpu": 1024, "cuda": 8192}, 64
_HIDDEN = {"cpu": 256, "cuda": 4096}
_ROWS = {"cpu": (512, 4096), "cuda": (4096, 16384)}
"""Rows of hidden states that elementwise operations are tried with: what stays in a core's cache, and what does not."""
_PARAMETER = {"cpu": (512, 512), "cuda": (4096, 4096)}
_NUM_PARAMETERS = 16
_WARM_UP_S = 0.4
_SERIES, _SERIES_S = 2, 0.02
"""A kind of computation is tried for this long at least; the faster series counts."""
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(device: torch.device, bf16: bool, per_host: int = 0) -> DeviceRates:
    """Returns the rates of this device. A collective of all workers. See [Note: how time is taken].

    Args:
        device: Where to compute.
        bf16: Whether computing in bfloat16 is worth measuring.
        per_host: Workers of each host; 0: all are on one.
    """
    kind = device.type
    long, short = _LONG[kind], _SHORT
    if kind == "cuda":
        _warm_up(long, device)
    precisions = ("fp32", "bf16") if bf16 else ("fp32",)
    products = [
        (precision, tokens, width, _product_flops_per_s(tokens, width, precision, device))
        for precision in precisions
        for tokens, width in ((long, long), (short, long), (long, short))
    ]
    elementwise = [
        (precision, *_elementwise_bytes_per_s(rows, _HIDDEN[kind], precision, device))
        for precision in precisions
        for rows in _ROWS[kind]
    ]
    return DeviceRates(
        products=tuple(products),
        elementwise=tuple(elementwise),
        start_s=_start_s(device),
        update_bytes_per_s=_update_bytes_per_s(device),
        exchanges=tuple(measure_exchanges(device, per_host)),
        between=tuple(measure_between(device, per_host)) if per_host else (),
    )


def _product_flops_per_s(tokens: int, width: int, precision: str, device: torch.device) -> float:
    left, right = (_random((rows, width), _PRECISIONS[precision], device) for rows in (tokens, width))
    return 2.0 * tokens * width * width / _seconds(lambda: F.linear(left, right), device)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns numbers as models have them. Numbers that are all equal cost a GPU less energy, so that it clocks higher.

    The H200 multiplies matrices of zeros at 894 TFLOP/s and random ones at 788. The generator is its own: draws of
    models go on as if nothing had been measured.
    """
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=dtype, device=device)


# -- elementwise operations --------------------------------------------------------------------------------------------

_MOVED = 2 * 4 + 2 * 3 + 3 * 7
"""Values that `_elementwise` reads and writes for each value of the hidden state, counted as in the planner's profile
of a block: four by a norm, three by a sum, seven by the activation and the gate, which are three times as wide."""


def _elementwise(hidden: Tensor, scale: Tensor, up: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what the norms and sums of a block, and its activation, make of a hidden state and of two wider ones."""
    for _ in range(2):
        hidden = hidden + _normed(hidden, scale)
    return hidden, F.silu(gate) * up


def _normed(hidden: Tensor, scale: Tensor) -> Tensor:
    return scale * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6))


def _elementwise_bytes_per_s(rows: int, width: int, precision: str, device: torch.device) -> tuple[int, float]:
    """Returns the bytes that the forward of `_elementwise` moves, and the rate; a backward moves twice as many."""
    shapes = ((rows, width), (width,), (rows, 3 * width), (rows, 3 * width))
    inputs = [torch.ones(shape, dtype=_PRECISIONS[precision], device=device, requires_grad=True) for shape in shapes]
    grads = [torch.ones_like(inputs[0]), torch.ones_like(inputs[2])]
    seconds = _seconds(lambda: torch.autograd.grad(_elementwise(*inputs), inputs, grads), device)
    moved = _MOVED * rows * width * inputs[0].element_size()
    return moved, 3.0 * moved / seconds


def _update_bytes_per_s(device: torch.device) -> float:
    """Returns what a step of AdamW moves: weights and two averages read and written, gradients read three times."""
    parameters = [nn.Parameter(torch.ones(_PARAMETER[device.type], device=device)) for _ in range(_NUM_PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=device.type == "cuda" or None)  # as `worker_optimizer.py` has it
    return 36.0 * sum(one.numel() for one in parameters) / _seconds(optimizer.step, device)


# -- starting operations -----------------------------------------------------------------------------------------------

_OPERATIONS = 34
"""Operations of a block with rotation, as the planner counts them."""
_BACKWARD = 1.5
"""How long starting a backward takes, in forwards, as the planner has it."""


class _Block(nn.Module):
    """A decoder's block so small that only its operations count.

    Args:
        width: Width of its hidden state; two heads.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns a hidden state of the same shape."""
        normed = _normed(hidden, self.scale)
        heads = (*hidden.shape[:2], 2, -1)
        queries, keys, values = (
            part(normed).view(heads).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        )
        queries, keys = (one * 0.5 + _half_turned(one) * 0.5 for one in (queries, keys))
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(hidden.shape))
        normed = _normed(hidden, self.scale)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _half_turned(values: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _start_s(device: torch.device) -> float:
    """Returns what the forward of an operation takes however small it is, from forward and backward of a block."""
    block, hidden = _Block(32).to(device), torch.ones(1, 2, 32, device=device)
    parameters = list(block.parameters())

    def run() -> None:
        torch.autograd.grad(block(hidden).sum(), parameters)

    return _seconds(run, device) / ((1.0 + _BACKWARD) * _OPERATIONS)


def _warm_up(width: int, device: torch.device) -> None:
    """Has a GPU work until it clocks high. See [Note: how time is taken]."""
    values, started_s = _random((width, width), torch.float32, device), time.perf_counter()
    while time.perf_counter() - started_s < _WARM_UP_S:
        F.linear(values, values)
        torch.cuda.synchronize()


def _queued_seconds(run: Callable[[], object], wait: Callable[[], object]) -> float:
    """Returns how long a run takes on a device that computes what is queued; `wait` waits for all of it."""
    run()  # as below
    wait()

    def series(count: int) -> float:
        started_s = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        return (time.perf_counter() - started_s) / count

    once_s = series(2)
    found = []
    for _ in range(_SERIES):
        if is_initialized():
            dist.barrier()
            wait()
        found.append(series(max(2, round(_SERIES_S / max(once_s, 1e-6)))))
    return min(found)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns how long a run takes while all workers do the same. See [Note: how time is taken]."""
    if device.type == "cuda":
        return _queued_seconds(run, torch.cuda.synchronize)
    clock = time.thread_time
    run()  # the first one allocates, and finds its kernel
    found = []
    for _ in range(_SERIES):
        if is_initialized():
            dist.barrier()
        count, started_s = 0, clock()
        while clock() - started_s < _SERIES_S:
            run()
            count += 1
        found.append((clock() - started_s) / count)
    return min(found)
