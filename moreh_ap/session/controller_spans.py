"""What becomes a span in the script's process: calls, backward, steps, messages, and where the script waits.

Decides which functions are timed while a trace is recorded, and how a span is called. They are put in for that time, so
that nothing of this is on the way of a step that is not traced. Must not know which steps are traced.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moreh_ap.patching import Patches, PatchGroup
from moreh_ap.protocol.encoding import Packed, Place, SentPlace
from moreh_ap.protocol.messages.stream import Batch
from moreh_ap.protocol.messages.traces import words
from moreh_ap.runtime.future import Reply
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.script_line import place
from moreh_ap.session.session import Session
from moreh_ap.tracing.spans import Recorder, now_ns

_MOST_NAMED = 3
"""Kinds of commands in the name of a message's span; all are in its details."""


class ControllerSpans:
    """Times the script's process from its making until `stop`.

    Args:
        session: Its workers are those whose messages have a number in the trace.

    Attributes:
        recorder: Has the spans.
    """

    def __init__(self, session: Session) -> None:
        self.recorder, self._session = Recorder(), session
        self._inside = _Inside()
        self._stepping: dict[int, int] = {}  # by the optimizer's id, when its step began
        self._contents: dict[int, list[str]] = {}  # by a message's number, the kinds of commands in it
        self._patches = Patches()
        group = self._patches.group("A trace of steps is recorded.")
        self._time_training(group)
        self._time_workers(group)

    def stop(self) -> None:
        """Has everything as it was before."""
        self._patches.undo()

    def _time_training(self, group: PatchGroup) -> None:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Calls a module, timed."""
            with self._outermost(f"call {type(module).__name__}", "call"):
                return original_call(module, *args, **kwargs)

        def backward(*args: Any, **kwargs: Any) -> Any:
            """Runs a backward, timed."""
            with self._outermost("backward", "backward"):
                return original_backward(*args, **kwargs)

        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            """Clears gradients, timed."""
            with self._outermost("zero_grad", "optimizer"):
                original_zero_grad(optimizer, set_to_none)

        def next_batch(iterator: Any) -> Any:
            """Takes a batch of a DataLoader, timed."""
            with self._outermost("next batch of the DataLoader", "data"):
                return original_next(iterator)

        original_call = group.replace(nn.Module, "__call__", call)
        original_backward = group.replace(torch.autograd, "_engine_run_backward", backward)
        original_zero_grad = group.replace(Optimizer, "zero_grad", zero_grad)
        original_next: Any = None

        def time_loaders(loaders: types.ModuleType) -> None:
            nonlocal original_next
            original_next = group.replace(loaders._BaseDataLoaderIter, "__next__", next_batch)

        group.when_imported("torch.utils.data.dataloader", time_loaders)
        for hook in (
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ended),
        ):
            self._patches.on_undo(hook.remove)

    @contextlib.contextmanager
    def _outermost(self, name: str, category: str) -> Iterator[None]:
        """Times what is inside, unless that is part of something that is timed in this way already."""
        if self._inside.depth:
            yield
            return
        self._inside.depth += 1
        try:
            with self.recorder.span(name, category, where=place()):
                yield
        finally:
            self._inside.depth -= 1

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping[id(optimizer)] = now_ns()

    def _step_ended(self, optimizer: Optimizer, *_: Any) -> None:
        began_ns = self._stepping.pop(id(optimizer), None)
        if began_ns is not None:
            name = f"optimizer step ({type(optimizer).__name__})"
            self.recorder.add(name, "optimizer", began_ns, now_ns(), where=place())

    def _time_workers(self, group: PatchGroup) -> None:
        sizes = threading.local()

        def submit(workers: WorkerGroup, command: object, *, recoverable: bool = False) -> Reply:
            """Sends a command, timed."""
            kinds = [words(type(one)) for one in (command.commands if isinstance(command, Batch) else (command,))]
            with self.recorder.span(f"send {_shortly(kinds)}", "message", commands=kinds) as details:
                reply: Reply = original_submit(workers, command, recoverable=recoverable)
                details["bytes"] = sizes.of_message
                if workers is self._session.workers:
                    details["message"] = reply.number
                    self._contents[reply.number] = kinds
                return reply

        def pack(workers: WorkerGroup, command: object) -> Packed:
            """Packs a command, and notes how many bytes it has."""
            packed: Packed = original_pack(workers, command)
            sizes.of_message = _num_bytes(packed)
            return packed

        def wait(workers: WorkerGroup, reply: Reply, timeout_s: float | None = None) -> None:
            """Waits for an answer, timed."""
            if reply.done():
                original_wait(workers, reply, timeout_s)
                return
            kinds = self._contents.get(reply.number, ["an earlier message"])
            details = {"where": place(), "answer_to": reply.number, "commands": kinds}
            with self.recorder.span(f"waiting for the answer to {_shortly(kinds)}", "wait", **details):
                original_wait(workers, reply, timeout_s)

        original_submit = group.replace(WorkerGroup, "submit", submit)
        original_pack = group.replace(WorkerGroup, "_packed", pack)
        original_wait = group.replace(WorkerGroup, "_wait", wait)


class _Inside(threading.local):
    """How deep this thread is in functions that are timed."""

    depth = 0


def _num_bytes(packed: Packed) -> int:
    values = (*packed.buffers, *packed.aside)
    places = (Place, SentPlace)
    return len(packed.pickle) + sum(one.num_bytes if isinstance(one, places) else len(one) for one in values)


def _shortly(kinds: list[str]) -> str:
    """Returns the first kinds of commands of a message, each once."""
    each = list(dict.fromkeys(kinds))
    left_out = f" and {len(each) - _MOST_NAMED} more" if len(each) > _MOST_NAMED else ""
    return ", ".join(each[:_MOST_NAMED]) + left_out
