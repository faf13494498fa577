"""How long exchanges between workers take, by kind, number of members and bytes.

Decides which exchanges are tried and how often. Must not know what the figures are used for.

[Note: exchanges]
Kinds differ greatly: gloo sums while it scatters in one case and sums everything in another, and the tensor axis
changes the layout of what it exchanges. So every kind is tried the way the parallelizer has it: flat tensors with the
copies that gathering, scattering and summing parameters and gradients take, and hidden states as they cross the tensor
axis, forward and backward. Every worker computes something before each exchange, so that it finds neither its tensors
in the cache nor the others in step, as in training. On CPU workers an exchange costs the cores that compute, and pairs
are tried beside the group of all, all pairs at a time. The median counts. It is kept beside what the worker's own
threads took, waiting not counted, of which the lower quartile counts: other programs only add to it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import get_rank, get_world_size, is_initialized

from moreh_ap.parallelizer.group_sums import host_sums
from moreh_ap.parallelizer.tensor.crossing import Crossing

Exchange = tuple[str, int, int, float, float]
"""Kind, members, bytes of the whole, seconds, seconds of the processor."""

_BYTES = {"cpu": (1 << 10, 1 << 20, 1 << 22), "cuda": (1 << 10, 1 << 20, 1 << 26)}
_ALTOGETHER_S = 1.2
_LEAST_TIMES, _MOST_TIMES = 3, 16
_TOKENS = {"cpu": 256, "cuda": 8192}
_KINDS = 6
_SLOW_S = 0.1
"""A kind of exchange that takes so long is not measured with more bytes."""

# torch 2.13 warns of the older names, and 2.11 has no others.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure_exchanges(device: torch.device, per_host: int = 0) -> Iterator[Exchange]:
    """Yields what exchanges inside of a host take. A collective of all workers. See [Note: exchanges].

    Args:
        device: This worker's.
        per_host: Workers of each host; 0: all are on one.
    """
    world = get_world_size() if is_initialized() else 1
    most = per_host or world
    if most == 1:
        return
    sizes = sorted({2, most}) if device.type == "cpu" and most % 2 == 0 else [most]
    yield from _measured([(size, 1) for size in sizes], device)


def measure_between(device: torch.device, per_host: int) -> Iterator[Exchange]:
    """Yields what exchanges over all hosts take: of one worker of each host, and of all workers.

    Those of one worker of each host are as many groups as a host has workers, all at the same time: they share the
    links as the groups of a plan do. What would take long between slow hosts is measured with fewer bytes.
    """
    world = get_world_size()
    yield from _measured(dict.fromkeys([(world // per_host, per_host), (world, 1)]), device)


def _measured(groups: Iterable[tuple[int, int]], device: torch.device) -> Iterator[Exchange]:
    """Yields what exchanges take in groups of a size, whose members are a number of ranks apart."""
    groups = list(groups)
    each_s = _ALTOGETHER_S / (len(groups) * len(_BYTES[device.type]) * _KINDS)
    for size, stride in groups:
        group = _group(size, stride)
        slow: set[str] = set()
        for num_bytes in _BYTES[device.type]:
            for kind, run, whole_bytes in _kinds(group, num_bytes, device):
                if kind in slow:
                    continue
                longest_s, seconds, processor_s = _seconds(run, device, each_s)
                yield kind, size, whole_bytes, seconds, processor_s
                if longest_s > _SLOW_S:  # all workers agree on that
                    slow.add(kind)
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _group(size: int, stride: int) -> dist.ProcessGroup:
    """Returns this worker's group; all make theirs."""
    world = get_world_size()
    if size == world:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if stride == 1:
        made: dist.ProcessGroup = dist.new_subgroups(group_size=size)[0]
    else:
        made = dist.new_subgroups_by_enumeration([list(range(first, world, stride)) for first in range(stride)])[0]
    return made


def _kinds(
    group: dist.ProcessGroup, num_bytes: int, device: torch.device
) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Yields every kind of exchange of about so many bytes, as its name, what runs it, and its bytes."""
    size, rank = get_world_size(group), get_rank(group)
    elements = -(-num_bytes // (4 * size)) * size
    full, shard = torch.ones(elements, device=device), torch.ones(elements // size, device=device)
    bucket, hosts = torch.empty_like(full), host_sums(group, device.type)

    def sum_up() -> None:
        bucket.copy_(full)
        if hosts is None:
            dist.all_reduce(bucket, group=group)
        else:
            hosts.start(bucket).wait()

    def gather() -> None:
        received = torch.empty_like(full)
        _all_gather(received, shard, group=group)
        torch.empty_like(full).copy_(received)

    def scatter() -> None:
        _reduce_scatter(torch.empty_like(shard), torch.empty_like(full).copy_(full), group=group)

    def send_on() -> None:
        neighbours = [
            dist.P2POp(dist.isend, full, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, torch.empty_like(full), group=group, group_peer=(rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(neighbours):
            work.wait()

    yield "sum", sum_up, full.nbytes
    yield "gather", gather, full.nbytes
    yield "scatter", scatter, full.nbytes
    yield "message", send_on, full.nbytes
    crossing = Crossing(DeviceMesh.from_group(group, device.type))
    tokens = -(-elements // (32 * size)) * size
    hidden, own = torch.ones(2, tokens, 16, device=device), torch.ones(2, tokens // size, 16, device=device)

    def there_and_back(inside: Callable[[Tensor], Tensor], state: Tensor) -> None:
        state.requires_grad_()
        torch.autograd.grad(inside(state), state, state)

    def summed(state: Tensor) -> Tensor:
        return crossing.leave(crossing.enter(state) * 1.0)

    def split(state: Tensor) -> Tensor:
        return crossing.leave_split(crossing.gather_into(state, 1, tokens) * 1.0, 1)

    yield "crossing_sum", lambda: there_and_back(summed, hidden), hidden.nbytes
    yield "crossing_split", lambda: there_and_back(split, own), hidden.nbytes


def _seconds(run: Callable[[], object], device: torch.device, at_most_s: float) -> tuple[float, float, float]:
    """Returns what an exchange took the slowest worker once, what it takes, and this worker's processor for it; all
    workers run it equally often."""
    hidden = torch.ones(_TOKENS[device.type], 256, device=device)
    weight = torch.ones(1024, 256, device=device)

    def timed() -> tuple[float, float]:
        F.linear(hidden, weight)
        if device.type == "cuda":
            torch.cuda.synchronize()
        started_s, began_s = time.perf_counter(), time.process_time()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started_s, time.process_time() - began_s

    timed()  # the first one connects
    longest = torch.tensor(timed()[0], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    longest_s = float(longest)
    count = max(_LEAST_TIMES, min(_MOST_TIMES, int(at_most_s / longest_s)))
    found = [timed() for _ in range(count)]
    taken = sorted(processor_s for _, processor_s in found)
    return longest_s, statistics.median(seconds for seconds, _ in found), taken[len(taken) // 4]
