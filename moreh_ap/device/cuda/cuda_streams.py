"""Streams and events of the accelerator: all commands run in the order of the script.

A stream that the script makes is therefore the same stream, and an event is a position in the order of commands, with
the time at which the workers reached it. The classes replace `torch.cuda.Stream` and `torch.cuda.Event`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.transfers import require_accelerator
from moreh_ap.device.worker_backend import PlaceInOrder, WorkerBackend
from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches


class CommandStream:
    """The one stream of the accelerator."""

    _backend: WorkerBackend  # of the class that `install` makes for one accelerator

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        require_accelerator(device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CommandStream) and other._backend is self._backend

    def __hash__(self) -> int:
        return hash(id(self._backend))

    def __enter__(self) -> CommandStream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def synchronize(self) -> None:
        """Wait until everything is done that was asked for before."""
        self._backend.synchronize()

    def query(self) -> bool:
        """Whether everything is done that was asked for before; does not wait."""
        return self._backend.mark_place().done()

    def record_event(self, event: CommandEvent | None = None) -> CommandEvent:
        """Put `event`, or a new one, at this place in the order, and return it."""
        recorded: Any = torch.cuda.Event() if event is None else event
        recorded.record(self)
        return recorded  # type: ignore[no-any-return]

    def wait_event(self, event: CommandEvent) -> None:
        """Nothing to do: what comes later runs later."""

    def wait_stream(self, stream: CommandStream) -> None:
        """Nothing to do: it is the same stream."""

    def is_capturing(self) -> bool:
        """False: there are no graphs to capture into."""
        return False


class CommandEvent:
    """A place in the order of commands; `elapsed_time` says how long the workers took from one to another."""

    _backend: WorkerBackend

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._enable_timing = enable_timing
        self._reached: PlaceInOrder | None = None
        self._reached_at_s = 0.0

    def record(self, stream: CommandStream | None = None) -> None:
        """Take the present place in the order; does not wait."""
        self._reached = self._backend.mark_place()
        self._reached.add_done_callback(self._note_time)

    def _note_time(self, _: PlaceInOrder) -> None:
        self._reached_at_s = time.perf_counter()

    def wait(self, stream: CommandStream | None = None) -> None:
        """Nothing to do: what comes later runs later."""

    def query(self) -> bool:
        """Whether the workers got there; True if the event was never recorded."""
        return self._reached is None or self._reached.done()

    def synchronize(self) -> None:
        """Wait until the workers got there; raise what went wrong."""
        if self._reached is not None:
            self._reached.result()

    def elapsed_time(self, end_event: CommandEvent) -> float:
        """Milliseconds from here to `end_event`. Waits for both, where a CUDA event would refuse.

        Raises:
            RuntimeError: An event was made without timing, or was not recorded; as PyTorch raises it.
        """
        if not (self._enable_timing and end_event._enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._reached is None or end_event._reached is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        self.synchronize()
        end_event.synchronize()
        return (end_event._reached_at_s - self._reached_at_s) * 1e3


def install(patches: Patches, backend: WorkerBackend) -> None:
    """Have streams and events of `torch.cuda` be those of the accelerator, and graphs refused."""
    group = patches.group("The accelerator takes commands in one order, that of the script.")
    # Classes stay classes, since annotations name them.
    stream = type("Stream", (CommandStream,), {"_backend": backend})
    event = type("Event", (CommandEvent,), {"_backend": backend})
    group.replace_all(
        torch.cuda,
        {
            **dict.fromkeys(("Stream", "ExternalStream", "current_stream", "default_stream"), stream),
            **dict.fromkeys(("CUDAGraph", "graph", "make_graphed_callables"), RefusedGraph),
            "Event": event,
            "stream": _use,
            "set_stream": _select,
        },
    )
    group.replace(torch.accelerator, "current_stream", stream)
    group.replace(torch.Tensor, "record_stream", _record_stream)
    # Libraries take this function at their import, where `torch.cuda.is_available()`; builds without CUDA have none.
    name, effect = "_cuda_getCurrentRawStream", "Returns the number of the only stream."
    group.put(vars(torch._C), name, _current_raw_stream, f"torch._C.{name}", effect)


@contextlib.contextmanager
def _use(stream: CommandStream | None) -> Iterator[None]:
    """Runs what is inside on `stream`: the one there is."""
    yield


def _select(stream: CommandStream) -> None:
    """Selects the only stream."""


def _current_raw_stream(device: int = 0) -> int:
    """Returns the number of the only stream, which is that of CUDA's default stream."""
    return 0


def _record_stream(tensor: Tensor, stream: CommandStream) -> None:
    """Nothing: commands run in order, so no memory is used again before its time."""


class RefusedGraph:
    """Replaces CUDA graphs; raises an error that says why they are not supported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "CUDA graphs: the accelerator takes commands one by one, and cannot replay a recorded graph.",
            allowed="The same loop without capture; commands are not waited for, so that launching them costs little.",
            fix="loss = model(batch).loss; loss.backward()  # instead of graph.replay()",
        )
