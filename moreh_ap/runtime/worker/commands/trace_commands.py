"""Commands about a trace of steps: what this worker does is recorded, by functions that are put in for that time.

Decides which spans a worker has: messages, the commands in them, collectives, and the time in between. Must not know
what commands do. While nothing is recorded, no function of the worker is another than without this module.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from moreh_ap.patching import Patches
from moreh_ap.protocol.messages.stream import Batch
from moreh_ap.protocol.messages.traces import BeginTrace, EndTrace, WorkerTrace, words
from moreh_ap.runtime.relay.worker_answer import Answer
from moreh_ap.runtime.worker.actor import WorkerSide
from moreh_ap.runtime.worker.commands.tables import Handlers
from moreh_ap.tracing.device_events import DeviceEvents
from moreh_ap.tracing.spans import Recorder, now_ns, this_clock


class TraceCommands:
    """Executes them.

    Args:
        executing: What executes a command, by the command's class: while a trace is recorded, each is timed.
        is_cuda: Whether the device has kernels to be recorded.
    """

    def __init__(self, executing: MutableMapping[type, Any], *, is_cuda: bool) -> None:
        self._executing, self._is_cuda = executing, is_cuda
        self._trace: _Trace | None = None

    def handlers(self) -> Handlers:
        """Returns what executes each command."""
        return {BeginTrace: self._begin, EndTrace: self._end}

    def _begin(self, command: BeginTrace) -> None:
        if self._trace is None:
            self._trace = _Trace(self._executing, self._is_cuda)

    def _end(self, command: EndTrace) -> WorkerTrace:
        trace, self._trace = self._trace, None
        return trace.end() if trace is not None else WorkerTrace(os.getpid(), this_clock(), ())


class _Trace:
    """Records from its making until `end`."""

    def __init__(self, executing: MutableMapping[type, Any], is_cuda: bool) -> None:
        self._recorder, self._patches = Recorder(), Patches()
        group = self._patches.group("A trace of steps is recorded.")
        for command, execute in tuple(executing.items()):
            if command not in (Batch, BeginTrace, EndTrace):
                timed = self._recorder.timed(execute, words(command), "command")
                group.put(executing, command, timed, words(command), "Is timed.")
        self._original = group.replace(WorkerSide, "execute", self._message_of(), "Is timed.")
        self._events = DeviceEvents(is_cuda)
        self._idle_since_ns = now_ns()

    def _message_of(self) -> Any:
        recorder = self._recorder

        def execute(side: WorkerSide, number: int, epoch: int, command: Any) -> Answer:
            """Executes a message, timed."""
            began_ns = now_ns()
            recorder.add("waiting for the next message", "wait", self._idle_since_ns, began_ns)
            with recorder.span("message", "message", message=number):
                answer: Answer = self._original(side, number, epoch, command)
            self._idle_since_ns = now_ns()
            return answer

        return execute

    def end(self) -> WorkerTrace:
        """Returns what was recorded."""
        self._patches.undo()
        clock = this_clock()
        spans = [span.on("commands") for span in self._recorder.spans]  # which one thread executes
        return WorkerTrace(os.getpid(), clock, (*spans, *self._events.stop(clock)))
