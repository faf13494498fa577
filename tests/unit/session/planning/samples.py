"""Machines and plans that planning is tried with."""

from __future__ import annotations

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.memory_footprint import MemoryEstimate
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.protocol.messages.devices import DeviceRates

GIB = 2**30


def candidate(plan: str, gib: float = 10.0) -> Candidate:
    memory = MemoryEstimate(gib * GIB, 0, 0, 0, 0, 0, 2 * GIB)
    return Candidate(Plan.parse(plan), memory, 40.0 * GIB)


KINDS = ("sum", "gather", "scatter", "message", "crossing_sum", "crossing_split")


def rates(slower: float = 1.0, sizes: tuple[int, ...] = (2,)) -> DeviceRates:
    """Returns what a worker might have measured; `slower` times as slow as another."""
    speeds = {"fp32": 2e11, "bf16": 1e12}
    return DeviceRates(
        products=tuple(
            (name, tokens, width, speed * part / slower)
            for name, speed in speeds.items()
            for tokens, width, part in ((1024, 1024, 1.0), (64, 1024, 0.5), (1024, 64, 0.8))
        ),
        elementwise=tuple((name, size, 2e10 / slower) for name in speeds for size in (10**7, 10**8)),
        start_s=1e-5 * slower,
        update_bytes_per_s=1e10 / slower,
        exchanges=tuple(
            (kind, members, size, place * slower * (1e-4 + size * 1e-9), place * slower * (8e-5 + size * 5e-10))
            for place, kind in enumerate(KINDS, 1)
            for members in sizes
            for size in (1000, 10**6)
        ),
    )
