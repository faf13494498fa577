"""What commands refer to on one worker, by the names that the controller gave.

Decides how a named tensor is found. Must not know what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.runtime.worker.call_preparation import CallPreparation
from moreh_ap.runtime.worker.row_shard_store import RowShard
from moreh_ap.runtime.worker.step_clock import StepClock
from moreh_ap.runtime.worker.worker_device import WorkerDevice
from moreh_ap.runtime.worker.worker_model import WorkerModel

Handlers = Mapping[type, Callable[[Any], Any]]
"""What executes a command and returns its answer, by the command's class."""


class HasOutputs(Protocol):
    """A call, as other subjects see it."""

    def row_shard(self, index: int) -> RowShard | None:
        """Returns this worker's shard of an output; None if it has no result."""


class HasState(Protocol):
    """An optimizer, as other subjects see it."""

    def state(self, index: int, key: str, *, fetch: bool = True) -> StateShard | None:
        """Returns one tensor of the state of parameter `index`; None if the parameter is not here."""


class Tables:
    """The tables of one worker.

    Args:
        rank: This worker's number.
        world_size: How many workers there are.
        device_type: "cpu" or "cuda".
    """

    def __init__(self, rank: int, world_size: int, device_type: str) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = WorkerDevice(rank, world_size, device_type)
        self.clock = StepClock(self.device.is_cuda)
        self.models: dict[str, WorkerModel] = {}
        self.preparations: dict[str, CallPreparation] = {}
        self.calls: Mapping[int, HasOutputs] = {}
        self.optimizers: Mapping[str, HasState] = {}
        self.row_shards: dict[int, RowShard | None] = {}
        self.temporaries: dict[StateRef, StateShard | None] = {}
        self.lists: dict[int, tuple[StateRef, ...]] = {}

    def state(self, ref: StateRef, *, fetch: bool = True) -> StateShard | None:
        """Returns this worker's shard of a tensor, on the device if `fetch`; None if only other workers hold it."""
        if ref in self.temporaries:
            return self.temporaries[ref]
        if ref.owner in self.models:
            return self.models[ref.owner].state(ref)
        return self.optimizers[ref.owner].state(int(ref.kind), ref.name, fetch=fetch)
