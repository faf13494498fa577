"""Sums flat tensors over a group of workers, first inside of each host where the group is on several.

Decides in how many exchanges a sum travels. Must not know what is summed.

[Note: sums through hosts]
Around a ring of all `W` workers, the link of a host passes `2 (W - 1) / W` times the tensor each way. If the workers of
a host sum first, each of them a part, then those with the same part on all `H` hosts, it passes `2 (H - 1) / H` times
the tensor: 1.0 instead of 1.5 on two hosts with two workers each. Each element is summed by one worker of a host, and
between hosts once, so that all workers have the same bits. Source: the bytes of the interfaces of two and four hosts,
docs/several-machines.md#links. The hosts' sum of a tensor starts with the next tensor's, when it is likely that the
host's own is done: both links are busy. NCCL knows where devices are, and is left to itself.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_process_group_ranks, get_rank, get_world_size

from moreh_ap.parallelizer.mesh import own_subgroup

__all__ = ["HostSums", "Sum", "host_sums", "workers_by_host", "workers_of_a_host"]

# torch 2.13 warns of the older name, and 2.11 has no other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Sum(Protocol):
    """A sum that has been started."""

    def wait(self) -> object:
        """Waits until the tensor is the sum."""


class HostSums:
    """Sums over a group with several workers on each of several hosts. See [Note: sums through hosts].

    Args:
        hosts: The ranks of the group, host by host, equally many each; this worker is one of them.

    Attributes:
        multiple: Tensors have a multiple of so many elements.
    """

    def __init__(self, hosts: tuple[tuple[int, ...], ...]) -> None:
        mine = next(ranks for ranks in hosts if get_rank() in ranks)
        self.multiple = len(mine)
        place = mine.index(get_rank())
        self.inside, self.across = own_subgroup(mine), own_subgroup(tuple(ranks[place] for ranks in hosts))
        self._latest: _HostSum | None = None

    def start(self, flat: torch.Tensor) -> Sum:
        """Starts to sum a flat tensor in place. All workers of the group start the same sums in the same order."""
        started = _HostSum(self, flat)
        self.cross()
        self._latest = started
        return started

    def cross(self) -> None:
        """Has the latest tensor summed between hosts."""
        if self._latest is not None:
            self._latest.cross()
            self._latest = None

    def forget(self) -> None:
        """Drops the latest tensor: its sum between hosts is not needed."""
        self._latest = None


class _HostSum:
    """One tensor on its way."""

    def __init__(self, sums: HostSums, flat: torch.Tensor) -> None:
        self._sums, self._flat = sums, flat
        self._parts = torch.empty_like(flat)  # of this worker's part, what each worker of the host has
        self._work = dist.all_to_all_single(self._parts, flat, group=sums.inside, async_op=True)

    def cross(self) -> None:
        """Waits for the host's sum of this worker's part, and starts that of all hosts."""
        self._work.wait()
        self._part = self._parts.view(self._sums.multiple, -1).sum(0)
        del self._parts
        self._work = dist.all_reduce(self._part, group=self._sums.across, async_op=True)

    def wait(self) -> None:
        """Waits for the sum and gathers its parts. The sums of a group are waited for in the order of their start."""
        self._sums.cross()
        self._work.wait()
        _all_gather(self._flat, self._part, group=self._sums.inside)


def host_sums(group: dist.ProcessGroup | None, device_type: str) -> HostSums | None:
    """Returns what sums over a group host by host; None where one collective does as well. A collective otherwise.

    Args:
        group: The group; None: all workers.
        device_type: Of the tensors.
    """
    hosts = workers_by_host(tuple(get_process_group_ranks(group)), workers_of_a_host())
    if device_type != "cpu" or len(hosts) == 1 or len({len(ranks) for ranks in hosts}) > 1 or len(hosts[0]) == 1:
        return None
    return HostSums(hosts)


def workers_by_host(ranks: tuple[int, ...], per_host: int) -> tuple[tuple[int, ...], ...]:
    """Returns ranks of workers, host by host.

    Example:
        >>> workers_by_host((0, 2, 4, 6), 4)
        ((0, 2), (4, 6))
    """
    hosts: dict[int, tuple[int, ...]] = {}
    for rank in ranks:
        hosts[rank // per_host] = (*hosts.get(rank // per_host, ()), rank)
    return tuple(hosts.values())


def workers_of_a_host() -> int:
    """Returns how many workers each host has, as launchers tell programs of PyTorch."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))
