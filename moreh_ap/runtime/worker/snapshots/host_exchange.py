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

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import get_rank, get_world_size  # those of `dist` are the script's

from moreh_ap.runtime.worker.snapshots.held_state import for_next_host, whole
from moreh_ap.runtime.worker.snapshots.slot_memory import SlotMemory

_PIECE_BYTES = 1 << 20
"""Sent to find out how long a copy takes to the next host: at 200 Mbit/s two workers need 0.1 s for it."""

PartOf = Callable[[int], SlotMemory]
"""Returns the part of a slot on this host that belongs to a worker, by its rank."""


def all_agree(is_fine: bool) -> bool:
    """Returns whether all workers say so. A collective."""
    fine = torch.tensor([int(is_fine)])
    dist.all_reduce(fine, dist.ReduceOp.MIN)
    return bool(fine)


class Passed(NamedTuple):
    """How copies went to the next host.

    Attributes:
        problem: Why a host cannot take copies of another one; empty if that is no problem.
        needed_s: What sending them would take, where it would take longer than it may; else 0.
    """

    problem: str = ""
    needed_s: float = 0.0


def pass_on(part_of: PartOf, per_host: int, number: int, most_s: float = math.inf) -> Passed:
    """Sends this worker's copy to the next host and takes one from the host before. A collective.

    Args:
        part_of: This host's slot.
        per_host: Workers of each host.
        number: Of the copy, which every worker has written.
        most_s: Seconds that it may take, the same for all workers or infinite for all: then a piece is sent first.
    """
    rank, world = get_rank(), get_world_size()
    source, problem = (rank - per_host) % world, ""
    description, values = for_next_host(*part_of(rank).read(number))
    if most_s < math.inf:
        needed_s = _seconds_of_a_piece(per_host) / _PIECE_BYTES * sum(value.numel() for value in values)
        if not all_agree(needed_s <= most_s):
            return Passed(needed_s=max(needed_s, most_s))
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
    return Passed(problem)


def _seconds_of_a_piece(per_host: int) -> float:
    """Returns what a piece takes to the next host, while all workers send one. A collective."""
    rank, world = get_rank(), get_world_size()
    taken, piece = torch.empty(_PIECE_BYTES, dtype=torch.uint8), torch.zeros(_PIECE_BYTES, dtype=torch.uint8)
    all_agree(True)  # the connections are there, and all begin now
    began_s = time.perf_counter()
    sending = _sent((piece,), (rank + per_host) % world)
    _receive((taken,), (rank - per_host) % world)
    for one in sending:
        one.wait()
    return time.perf_counter() - began_s


def fetch(part_of: PartOf, per_host: int, number: int) -> None:
    """Has every host get the copies of its workers and those of the host before it, as far as it lacks them.

    A collective. Copies that are there are not written again: nothing is lost if a host is lost meanwhile.

    Args:
        part_of: This host's slot.
        per_host: Workers of each host now.
        number: Of the copies.

    Raises:
        ValueError: No host has one of them.
    """
    world = get_world_size()
    found = _found(part_of, number, world)
    for other in range(world):
        for to in (other, (other + per_host) % world):
            if other not in found[to]:
                _pass(part_of, number, other, _source(found, number, other), to)


def fetch_all(part_of: PartOf, per_host: int, number: int, num_workers: int) -> None:
    """Has every host get the copies of all workers that there were. A collective.

    Args:
        part_of: This host's slot.
        per_host: Workers of each host now.
        number: Of the copies.
        num_workers: How many there were.

    Raises:
        ValueError: No host has one of them.
    """
    found = _found(part_of, number, num_workers)
    for other in range(num_workers):
        source = _source(found, number, other)
        for first in range(0, get_world_size(), per_host):
            if other not in found[first]:
                _pass(part_of, number, other, source, first + other % per_host)
    all_agree(True)  # the others of a host read what one of them has written


def _found(part_of: PartOf, number: int, num_workers: int) -> list[list[int]]:
    """Returns of each worker whose copies its host has."""
    found: list[list[int]] = [[]] * get_world_size()
    dist.all_gather_object(found, [other for other in range(num_workers) if part_of(other).has(number)])
    return found


def _source(found: Sequence[Sequence[int]], number: int, other: int) -> int:
    """Returns a worker whose host has a copy."""
    source = next((rank for rank, there in enumerate(found) if other in there), None)
    if source is None:
        raise ValueError(f"no host has copy {number} of worker {other}")
    return source


def _pass(part_of: PartOf, number: int, other: int, source: int, to: int) -> None:
    """Has one worker send the copy of a worker of before to another one, which writes it to the slot of its host."""
    rank = get_rank()
    if rank == source:
        description, values = whole(other, lambda one: part_of(one).read(number))
        sending = _sent_head(description, values, to)
        for one in [*sending, *_sent(values, to)]:
            one.wait()
    elif rank == to:
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
