"""The controller's side of one accelerator: an ordered stream of commands to the workers.

A session is made by the one line and lives until the process ends. Commands that nobody waits for (state operations,
releases) are gathered in an outbox and travel with the next message. It must not know how a model is called or stepped:
that is `model`, `call` and `optimizer`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from moreh_ap.option import Options
from moreh_ap.runtime.mesh import Reply, WorkerMesh
from moreh_ap.runtime.messages import (
    Batch,
    ClearGradients,
    DefineList,
    DescribeDevice,
    DeviceInfo,
    ReadState,
    ReleaseState,
    ReportMemory,
    StateRef,
    Synchronize,
    TensorData,
    WriteState,
)

_MAX_OUTBOX = 512
_MAX_DEFINITIONS = 4096


class Session:
    """Owns the workers and the order of everything they are told.

    Args:
        options: What the script asked for.
        mesh: Worker processes, started or starting.
    """

    def __init__(self, options: Options, mesh: WorkerMesh) -> None:
        self.options, self.mesh = options, mesh
        self.num_devices = mesh.num_workers
        self.generator = AcceleratorGenerator()
        self._devices: list[DeviceInfo] | None = None
        self._outbox: list[Any] = []
        # Filled by finalizers, which may run in any thread at any time: deque.append is atomic.
        self._released: deque[Any] = deque()
        self._definitions: dict[Hashable, int] = {}
        self._stale_definitions = False
        self._ids = itertools.count()

    def new_id(self) -> int:
        """A number that this session has not used before."""
        return next(self._ids)

    # -- sending ---------------------------------------------------------------------------------------------------

    def post(self, command: Any) -> None:
        """Put a command into the outbox: executed in order, before whatever is submitted next."""
        self._outbox.append(command)
        if len(self._outbox) >= _MAX_OUTBOX:
            self.flush()

    def post_clear(self, gradient: StateRef) -> None:
        """Put "this gradient is None now" into the outbox; neighbours are joined into one command."""
        last = self._outbox[-1] if self._outbox else None
        if not isinstance(last, _Clearing):
            last = _Clearing()
            self.post(last)
        last.gradients.append(gradient)

    def define(self, key: Hashable, make: Callable[[int], Any]) -> int:
        """A number that stands for `key` in commands; ``make(number)``, which tells the workers, is posted once."""
        if self._stale_definitions or len(self._definitions) >= _MAX_DEFINITIONS:
            # After a failure workers skip what was already on its way: they may not have heard of a definition.
            self._definitions.clear()
            self._stale_definitions = False
        if key not in self._definitions:
            number = self._definitions[key] = self.new_id()
            self.post(make(number))
        return self._definitions[key]

    def list_id(self, refs: tuple[StateRef, ...]) -> int:
        """A number for a list of state tensors."""
        return self.define(refs, lambda number: DefineList(number, refs))

    def release(self, command: Any) -> None:
        """Tell the workers, some time before the next command, that something is no longer needed."""
        self._released.append(command)

    def submit(self, command: Any) -> Reply:
        """Send the outbox and then `command`; the reply holds its result, one entry a worker."""
        commands = [*self._take_outbox(), command]
        reply = self.mesh.submit(command if len(commands) == 1 else Batch(tuple(commands)))
        reply.add_done_callback(self._note_failure)
        return reply

    def _note_failure(self, reply: Reply) -> None:
        self._stale_definitions = self._stale_definitions or reply.failed()

    def flush(self) -> None:
        """Send what is in the outbox, if anything."""
        commands = self._take_outbox()
        if commands:
            self.mesh.submit(Batch(tuple(commands))).add_done_callback(self._note_failure)

    def _take_outbox(self) -> list[Any]:
        gathered, self._outbox = self._outbox, []
        commands: list[Any] = []
        for command in gathered:
            if isinstance(command, _Clearing):
                command = ClearGradients(self.list_id(tuple(command.gradients)))
                commands += self._outbox  # the list's definition, if it is new
                self._outbox = []
            commands.append(command)
        while self._released:
            commands.append(self._released.popleft())
        return commands

    def synchronize(self) -> None:
        """Wait until the workers have done everything they were told; raise what went wrong.

        Raises:
            Exception: Whatever a worker raised, with its own type.
            WorkerLostError: If a worker process died.
        """
        self.submit(Synchronize()).result()
        self.mesh.drain()

    def close(self) -> None:
        """End the workers."""
        self.mesh.close()

    # -- tensors that workers keep -----------------------------------------------------------------------------------

    def read_state(self, refs: tuple[StateRef, ...]) -> list[Tensor]:
        """Whole values of state tensors, on the CPU. Waits."""
        return [data.tensor() for data in self.submit(ReadState(refs)).result()[0]]

    def write_state(self, values: dict[StateRef, Tensor]) -> None:
        """Set whole values of state tensors; does not wait."""
        self.submit(WriteState({ref: TensorData.of(tensor) for ref, tensor in values.items()}))

    def new_temporary(self) -> StateRef:
        """A fresh name for the result of an operation on state tensors."""
        return StateRef("session", "temporary", str(self.new_id()))

    def release_temporary(self, ref: StateRef) -> None:
        self.release(ReleaseState((ref,)))

    # -- the accelerator as a whole --------------------------------------------------------------------------------

    def devices(self) -> list[DeviceInfo]:
        """What stands behind the accelerator, a device each in rank order. Waits for the workers the first time."""
        if self._devices is None:
            self._devices = self.submit(DescribeDevice()).result()
        return self._devices

    def memory(self, *, reset_peak: bool = False, empty_cache: bool = False) -> dict[str, int]:
        """Bytes over all devices: ``allocated``, ``peak``, ``free``, ``total``. Waits."""
        reports = self.submit(ReportMemory(reset_peak=reset_peak, empty_cache=empty_cache)).result()
        return {name: sum(report[name] for report in reports) for name in ("allocated", "peak", "free", "total")}


class AcceleratorGenerator:
    """The accelerator's random number generator: a seed and a counter, as on a GPU.

    Every remote forward takes the next number of the stream, so that a run is reproduced by its seed whatever the
    controller draws for itself (shuffling, sampling).
    """

    def __init__(self) -> None:
        self._seed, self._offset = torch.initial_seed(), 0

    def manual_seed(self, seed: int) -> None:
        """Restart the stream."""
        self._seed, self._offset = int(seed), 0

    def initial_seed(self) -> int:
        return self._seed

    def next_seed(self) -> int:
        """The seed of the next remote forward."""
        self._offset += 1
        # splitmix64: neighbouring (seed, offset) pairs give unrelated streams. Source: Steele et al., OOPSLA 2014.
        mixed = (self._seed + self._offset * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return (mixed ^ (mixed >> 31)) >> 1


class _Clearing:
    """Gradients to clear, gathered while the script loops over its parameters."""

    def __init__(self) -> None:
        self.gradients: list[StateRef] = []
