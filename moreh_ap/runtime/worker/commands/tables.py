"""Models, calls, optimizers and tensors of one worker, by the names by which commands refer to them.

Decides how a named tensor is found. Must not know what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from moreh_ap.errors import NotComputedError
from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.protocol.messages.calls import DefineSignature
from moreh_ap.protocol.messages.lasting_commands import Structure
from moreh_ap.protocol.messages.memory_files import MemoryFile
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.protocol.process_flags import Flags
from moreh_ap.runtime.worker.call_preparation import CallPreparation
from moreh_ap.runtime.worker.commands.module_sums import ModuleSums
from moreh_ap.runtime.worker.row_shard_store import RowShard
from moreh_ap.runtime.worker.step_clock import StepClock
from moreh_ap.runtime.worker.worker_device import WorkerDevice
from moreh_ap.runtime.worker.worker_model import WorkerModel

Handlers = Mapping[type, Callable[[Any], Any]]
"""Functions that execute a command and return its answer, by the command's class."""


class HasOutputs(Protocol):
    """A call, as other subjects see it."""

    is_past: bool
    """Whether its backward is over, so that no further one runs through it."""

    def row_shard(self, index: int) -> RowShard | None:
        """Returns this worker's shard of an output; None if it has no result."""


class HasState(Protocol):
    """An optimizer, as other subjects see it."""

    refs: Sequence[StateRef]
    """Its parameters, by which the state of each is numbered."""

    def state(self, index: int, key: str, *, fetch: bool = True) -> StateShard | None:
        """Returns one tensor of the state of parameter `index`; None if the parameter is not here."""

    def held(self) -> dict[str, Any]:
        """Returns what the optimizer keeps, for another process with the same one."""

    def states(self) -> Iterator[tuple[int, str, Tensor, StateShard]]:
        """Yields the tensors of the state that are laid out like their parameters: number, key, tensor, parameter."""

    def put_back(self, held: Mapping[str, Any]) -> None:
        """Takes over what `held` has returned in another process."""

    def take_over(self, held: Mapping[str, Any], state: dict[int, dict[str, Any]]) -> None:
        """Takes over what `held` has returned under another plan, and states by parameter number, of whole tensors."""


class Table(dict[Any, Any]):
    """Objects that were made on one worker, by name.

    Args:
        tables: Knows why something may be missing.
    """

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self._tables = tables

    def __missing__(self, name: Any) -> Any:
        raise self._tables.missing(name)


class Tables:
    """The tables of one worker.

    Args:
        rank: This worker's number.
        world_size: How many workers there are.
        device_type: "cpu" or "cuda".
    """

    def __init__(self, rank: int, world_size: int, device_type: str) -> None:
        self.rank, self.world_size = rank, world_size
        self.last_error = ""
        self.device = WorkerDevice(rank, world_size, device_type)
        self.clock = StepClock(self.device.is_cuda)
        self.models: dict[str, WorkerModel] = self.table()
        self.preparations: dict[str, CallPreparation] = self.table()
        self.calls: Mapping[int, HasOutputs] = {}
        self.optimizers: Mapping[str, HasState] = {}
        self.row_shards: dict[int, RowShard | None] = self.table()
        self.temporaries: dict[StateRef, StateShard | None] = self.table()
        self.lists: dict[int, tuple[StateRef, ...]] = self.table()
        self.signatures: dict[int, DefineSignature] = self.table()
        self.recording: dict[str, ModuleSums] = {}
        self.flags: Flags | None = None
        self.structure = Structure()
        self.failed: tuple[type, int] | None = None  # the last command that raised, and those before it in its message
        self.before_forward: tuple[str, list[int]] = "", []  # the model of the last forward, versions of its buffers
        self.copies: Sequence[MemoryFile] = ()  # where copies of all of this may lie

    def table(self) -> Table:
        """Returns an empty table, which says of what is not in it that it was not computed after an error."""
        return Table(self)

    def note_error(self, error: BaseException, kind: type = object, num_done: int = 0) -> None:
        """Records an error of a command of a kind, after which commands were skipped."""
        self.failed = kind, num_done
        if not isinstance(error, NotComputedError):
            self.last_error = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def missing(self, name: Any) -> Exception:
        """Returns the error for what is in no table."""
        if not self.last_error:
            return KeyError(name)
        return NotComputedError(
            f"This value was not computed: the workers had raised {self.last_error}",
            allowed="Values that are computed after the error.",
            fix="loss = model(**batch).loss  # anew, with a batch that raises no error",
        )

    def state(self, ref: StateRef, *, fetch: bool = True) -> StateShard | None:
        """Returns this worker's shard of a tensor, on the device if `fetch`; None if only other workers hold it."""
        if ref in self.temporaries:
            return self.temporaries[ref]
        if ref.owner in self.models:
            return self.models[ref.owner].state(ref)
        return self.optimizers[ref.owner].state(int(ref.kind), ref.name, fetch=fetch)
