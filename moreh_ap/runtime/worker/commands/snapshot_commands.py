"""Commands that copy what a worker holds into memory that outlives it, and have another worker take it over."""

from __future__ import annotations

import time

from torch import Tensor

from moreh_ap.parallelizer.group_sums import workers_of_a_host
from moreh_ap.protocol.messages.memory_files import MemoryFile
from moreh_ap.protocol.messages.snapshots import (
    TOO_LARGE,
    TOO_LONG,
    Failed,
    RestoreSnapshot,
    Snapshot,
    TakeSnapshot,
)
from moreh_ap.runtime.worker.commands.tables import Handlers, Tables
from moreh_ap.runtime.worker.snapshots.held_state import CannotBeHeld, describe, take_over
from moreh_ap.runtime.worker.snapshots.host_exchange import PartOf, all_agree, fetch, fetch_all, pass_on
from moreh_ap.runtime.worker.snapshots.other_plan import take_over_from_all, why_bound, why_half_made
from moreh_ap.runtime.worker.snapshots.slot_memory import SlotMemory

COLD_BYTES_PER_S = 0.4e9
"""A copy to memory that was never touched: 0.81 GB took 1.3 to 2.9 s on two workers of two cores (26 November 2026)."""


class SnapshotCommands:
    """Executes them."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._parts: dict[tuple[int | MemoryFile, int], SlotMemory] = {}  # by slot and rank
        self._asked_s = 0.0

    def handlers(self) -> Handlers:
        """Returns what executes each command."""
        return {TakeSnapshot: self._take, RestoreSnapshot: self._restore}

    def _part_of(self, slot: int | MemoryFile) -> PartOf:
        def part(rank: int) -> SlotMemory:
            if (slot, rank) not in self._parts:
                file = slot if isinstance(slot, MemoryFile) else self._tables.copies[slot]
                self._parts[slot, rank] = SlotMemory(file, rank * file.bytes_per_worker)
            return self._parts[slot, rank]

        return part

    def _take(self, command: TakeSnapshot) -> Snapshot:
        began_s, before_s = time.perf_counter(), self._asked_s
        self._asked_s = began_s
        taken = self._copied(command)
        # After an error a worker may have begun a collective that another has not: they exchange nothing any more.
        if not command.after_error and self._are_on_several_hosts() and all_agree(not taken.problem):
            left_s = max(0.0, command.most_s - taken.num_bytes / COLD_BYTES_PER_S)
            passed = pass_on(self._part_of(command.slot), workers_of_a_host(), command.number, left_s)
            if passed.problem:
                taken = taken._replace(problem=f"{TOO_LARGE}: {passed.problem}")
            elif passed.needed_s:
                taken = taken._replace(problem=TOO_LONG, seconds=command.most_s - left_s + passed.needed_s)
        if taken.problem == TOO_LONG:
            self._asked_s = before_s
        since_s = began_s - before_s if before_s else 0.0
        return taken if taken.problem else taken._replace(seconds=time.perf_counter() - began_s, since_s=since_s)

    def _copied(self, command: TakeSnapshot) -> Snapshot:
        """Copies what this worker holds into its part of a slot."""
        num_bytes = 0
        try:
            description, memory = describe(self._tables, is_alone=command.is_alone)
            num_bytes = len(description) + sum(one.numel() for one in memory)
            if num_bytes > command.most_bytes:
                return Snapshot(TOO_LARGE, num_bytes)
            would_take_s = num_bytes / COLD_BYTES_PER_S
            if would_take_s > command.most_s:
                return Snapshot(TOO_LONG, num_bytes, would_take_s)
            self._part_of(command.slot)(self._tables.rank).write(command.number, description, memory)
            bound = why_bound(self._tables)
        except CannotBeHeld as reason:
            return Snapshot(str(reason))
        except OSError as error:
            return Snapshot(f"{TOO_LARGE}: {error}", num_bytes)
        except Exception as error:  # of any class: that there is no copy is no error of the script
            return Snapshot(f"{type(error).__name__}: {error}")
        failed = self._failed(command.is_alone) if command.after_error else None
        return Snapshot("", num_bytes, bound=bound, failed=failed)

    def _failed(self, is_alone: bool) -> Failed:
        tables = self._tables
        num_done = 0 if tables.failed is None else tables.failed[1]
        structure = tables.structure.commands() if is_alone or tables.rank == 0 else ()
        return Failed(num_done, why_half_made(tables), structure)

    def _restore(self, command: RestoreSnapshot) -> None:
        part_of = self._part_of(command.slot)

        def read(rank: int) -> tuple[bytes, list[Tensor]]:
            return part_of(command.first + rank).read(command.number)

        are_several = self._are_on_several_hosts()
        if command.of_workers is None:
            if are_several:
                fetch(part_of, workers_of_a_host(), command.number)
            take_over(self._tables, read)
        else:
            if are_several:
                fetch_all(part_of, workers_of_a_host(), command.number, command.of_workers)
            take_over_from_all(self._tables, read, command.of_workers)

    def _are_on_several_hosts(self) -> bool:
        return self._tables.world_size > 1 and workers_of_a_host() < self._tables.world_size
