"""A worker's side of `moreh-ap doctor`: sends, receives and sums values that every rank knows beforehand.

Decides what is sent, and counts what arrived wrong. Must not know how long that may take, nor what is made of it.
Values are whole numbers below 2^24, which float32 holds exactly, so every comparison is for equality.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

SIZES = (16, 1 << 18)
"""Elements of the messages: a short one and one of 1 MiB."""

_LARGEST = 1 << 16
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class PointToPoint:
    """Worker `sender` sends to `receiver`; the receiver answers a `Received`, all others None."""

    sender: int
    receiver: int


@dataclass(frozen=True)
class Collective:
    """All workers take part in ``all_reduce``, ``all_gather`` or ``broadcast`` and answer a `Received` each."""

    name: str


@dataclass(frozen=True)
class Received:
    """The data that one worker received.

    Attributes:
        num_wrong: Elements that are not what they should be, over all sizes.
        num_elements: Elements that arrived.
        example: The first wrong one, in words.
        seconds: For the last, largest message.
    """

    num_wrong: int
    num_elements: int
    example: str
    seconds: float


class LinkExecutor:
    """Executes `PointToPoint` and `Collective` on one device.

    Args:
        rank: This worker's number.
        world_size: How many workers there are.
        device_type: "cpu" or "cuda".
    """

    def __init__(self, rank: int, world_size: int, device_type: str) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else _CPU

    def execute(self, command: PointToPoint | Collective) -> Received | None:
        """Executes one command.

        Raises:
            RuntimeError: What the process group raises, for example after its time-out.
        """
        if isinstance(command, PointToPoint):
            return self._exchange(command)
        return _checked([self.run_collective(command.name, size) for size in SIZES])

    def _exchange(self, command: PointToPoint) -> Received | None:
        if self.rank == command.sender:
            for size in SIZES:
                self.send(self.values_of(command.sender, size), command.receiver)
        if self.rank != command.receiver:
            return None
        found = []
        for size in SIZES:
            buffer = torch.full((size,), -1.0, device=self.device)
            started_s = time.perf_counter()
            dist.recv(buffer, src=command.sender)
            found.append((buffer, self.values_of(command.sender, size), time.perf_counter() - started_s))
        return _checked(found)

    def send(self, values: Tensor, receiver: int) -> None:
        """Sends values to another worker."""
        dist.send(values, dst=receiver)

    def values_of(self, rank: int, size: int) -> Tensor:
        """Returns what a worker contributes: whole numbers from 1, other ones for each worker."""
        return ((torch.arange(size, device=self.device) * (2 * rank + 3)) % _LARGEST + rank + 1).float()

    def run_collective(self, name: str, size: int) -> tuple[Tensor, Tensor, float]:
        """Returns what a collective gave, what it should have given, and its seconds."""
        own = self.values_of(self.rank, size)
        every = [self.values_of(rank, size) for rank in range(self.world_size)]
        started_s = time.perf_counter()
        if name == "all_reduce":
            dist.all_reduce(own)
            got, expected = own, torch.stack(every).sum(dim=0)
        elif name == "all_gather":
            parts = [torch.full_like(own, -1.0) for _ in every]
            dist.all_gather(parts, own)
            got, expected = torch.cat(parts), torch.cat(every)
        else:
            last = self.world_size - 1
            dist.broadcast(own, src=last)
            got, expected = own, every[last]
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return got, expected, time.perf_counter() - started_s


def _checked(found: list[tuple[Tensor, Tensor, float]]) -> Received:
    num_wrong, example = 0, ""
    for got, expected, _ in found:
        (places,) = torch.nonzero(got != expected, as_tuple=True)
        num_wrong += len(places)
        if len(places) and not example:
            place = int(places[0])
            example = f"element {place} of {len(got)} is {got[place].item():g}, not {expected[place].item():g}"
    return Received(num_wrong, sum(len(got) for got, _, _ in found), example, found[-1][2])
