"""Copies on their way between hosts: each host's to the next one, and from there to where workers take over.

Decides who sends which copy to whom. Must not know what is in a copy.

[Note: the next host]
Copies lie in memory of a host. If it is lost, they are too. So every worker sends its copy to the worker with the same
place on the next host, which writes it beside its own; what some worker of that host holds itself is left out
(`held_state.for_next_host`). Workers that take over may be on other hosts than those before them: each host then gets
the copies of its workers from a host that has them. All workers take part in both, as in any exchange, and agree
before anything large travels: one that cannot take its part must not leave another waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import get_rank, get_world_size  # those of `dist` are the script's

from moreh_ap.runtime.worker.snapshots.held_state import for_next_host, whole
from moreh_ap.runtime.worker.snapshots.slot_memory import SlotMemory

PartOf = Callable[[int], SlotMemory]
"""Returns the part of a slot on this host that belongs to a worker, by its rank."""


def all_agree(is_fine: bool) -> bool:
    """Returns whether all workers say so. A collective."""
    fine = torch.tensor([int(is_fine)])
    dist.all_reduce(fine, dist.ReduceOp.MIN)
    return bool(fine)


def pass_on(part_of: PartOf, per_host: int, number: int) -> str:
    """Sends this worker's copy to the next host and takes one from the host before. A collective.

    Args:
        part_of: This host's slot.
        per_host: Workers of each host.
        number: Of the copy, which every worker has written.

    Returns:
        Why a host cannot take copies of another one, empty if all have them.
    """
    rank, world = get_rank(), get_world_size()
    source, problem = (rank - per_host) % world, ""
    description, values = for_next_host(*part_of(rank).read(number))
    sending = _sent_head(description, values, (rank + per_host) % world)
    described, sizes = _received_head(source)
    try:
        places = part_of(source).begin(described, sizes)
    except OSError as error:
        places, problem = [], str(error)
    if all_agree(not problem):
        sending += _sent(values, (rank + per_host) % world)
        _receive(places, source)
        part_of(source).end(number)
    else:
        problem = problem or "another host has no memory for it"
    for one in sending:
        one.wait()
    return problem


def fetch(part_of: PartOf, number: int) -> None:
    """Has every host get the copies of its workers that are on another one alone. A collective.

    Raises:
        ValueError: No host has one of them.
    """
    rank, world = get_rank(), get_world_size()
    found: list[list[int]] = [[]] * world
    dist.all_gather_object(found, [other for other in range(world) if part_of(other).has(number)])
    for other in range(world):
        if other in found[other]:
            continue
        source = next((one for one in range(world) if other in found[one]), None)
        if source is None:
            raise ValueError(f"no host has copy {number} of worker {other}")
        if rank == source:
            description, values = whole(other, lambda one: part_of(one).read(number))
            sending = _sent_head(description, values, other)
            for one in [*sending, *_sent(values, other)]:
                one.wait()
        elif rank == other:
            _receive(part_of(other).begin(*_received_head(source)), source)
            part_of(other).end(number)


def _sent_head(description: bytes, values: Sequence[Tensor], to: int) -> list[dist.Work]:
    """Sends all but the values: how much there is of what, their sizes, and the description."""
    counts = torch.tensor([len(description), len(values)])
    sizes = torch.tensor([value.numel() for value in values], dtype=torch.int64)
    said = torch.frombuffer(bytearray(description), dtype=torch.uint8)
    return _sent((counts, sizes, said), to)


def _received_head(source: int) -> tuple[bytes, list[int]]:
    counts = torch.zeros(2, dtype=torch.int64)
    dist.recv(counts, source)
    num_described, num_values = counts.tolist()
    sizes, said = torch.empty(num_values, dtype=torch.int64), torch.empty(num_described, dtype=torch.uint8)
    for one in (sizes, said):
        if one.numel():
            dist.recv(one, source)
    return said.numpy().tobytes(), sizes.tolist()


def _receive(places: Sequence[Tensor], source: int) -> None:
    for place in places:
        if place.numel():
            dist.recv(place, source)


def _sent(tensors: Sequence[Tensor], to: int) -> list[dist.Work]:
    started = [dist.isend(one, to) for one in tensors if one.numel()]
    return [one for one in started if one is not None]  # none is: every worker is in the group of all
