"""Ctrl-C never lands in the middle of one of our functions: it is raised once they return, or where they wait.

Decides where a KeyboardInterrupt is raised. Must not know what the functions do that are not interrupted.

[Note: interrupts]
Python runs the handler of SIGINT between any two of its instructions, and what that raises appears there. In a
function of ours it may leave tensors without their class, a command numbered but not sent, a function mode off: after
a Ctrl-C in a notebook the next cell would fail. `with` does not help, since the exception may come in `__enter__` or
`__exit__`. So the handler looks at the frames. If the innermost one that is not of a library below us (PyTorch, the
engine) is ours, the frame of the script around it is traced (`sys.settrace`), and raises as soon as ours have
returned. That takes microseconds, since our functions are short, but for those that wait for the workers:
`wait_in_turns` raises between two turns, and never while it holds a lock, without which another thread would wait for
ever. A second Ctrl-C raises where it lands, and so does the first after `_PATIENCE_S`, or under a debugger, which
traces already. A step without a Ctrl-C pays nothing.

A trace function may raise where Python never does: between the last instruction of a `with` block and its `__exit__`,
which then does not run. So it raises after a call, as Python does, and only if what handles an exception there is
what handled one in the call.
"""

from __future__ import annotations

import dis
import inspect
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(inspect.getfile(torch))) + os.sep
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = tuple(_STANDARD + name + os.sep for name in ("site-packages", "dist-packages"))
_BESIDE_TORCH = os.path.dirname(_TORCH[:-1]) + os.sep
_CALLED_BY_US = tuple(_BESIDE_TORCH + name + os.sep for name in ("monarch", "cloudpickle", "psutil", "safetensors"))

_PATIENCE_S = 3.0
"""Longer than any step of ours takes that must not be cut in two. Loading and planning take longer, and may be."""

_FINALIZER = weakref.finalize.__call__.__code__
"""What Python raises in finalizers it prints, and forgets."""

_MODES = os.path.abspath(inspect.getfile(torch.overrides))
"""Takes a function mode, which the script has because of us, off and puts it on again."""

TURN_S = 0.2
"""Within which a wait can be interrupted."""


def wait_in_turns(wait: Callable[[float], object], timeout_s: float | None = None) -> bool:
    """Waits in a way that Ctrl-C ends within `TURN_S`.

    Args:
        wait: Waits for so many seconds at most; returns whether it need not be called again.
        timeout_s: None: without a limit.

    Returns:
        Whether `wait` said so in time.
    """
    until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while not wait(min(TURN_S, max(0.0, until_s - time.monotonic()))):
        if time.monotonic() >= until_s:
            return False
        _between_turns()
    return True


def _between_turns() -> None:
    """Is where an interrupt of a wait is raised."""


def install() -> Callable[[], None]:
    """Has Ctrl-C be handled as the note says, where Python's own handler would; returns what takes that back.

    A script's own handler stays. IPython sets Python's before each cell: there the handler is set for each cell anew.
    """
    _set_handler()
    events = _events_of_ipython()
    if events is not None:
        events.register("pre_run_cell", _set_handler)

    def undo() -> None:
        if events is not None:
            events.unregister("pre_run_cell", _set_handler)
        if is_main_thread() and signal.getsignal(signal.SIGINT) is _on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    return undo


def _events_of_ipython() -> Any:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "events", None)


def _set_handler(*_: object) -> None:
    if is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def is_main_thread() -> bool:
    """Returns whether this thread is the one in which handlers of signals run."""
    return threading.current_thread() is threading.main_thread()


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    tracing = sys.gettrace()
    deferred = getattr(tracing, "__self__", None)
    if isinstance(deferred, _Deferred):
        deferred.end()
    elif tracing is None:
        script = _script_frame(frame)
        if script is not None:
            _Deferred(script).begin()
            return
    signal.default_int_handler(number, frame)


def is_in_ours(frame: FrameType | None) -> bool:
    """Returns whether a function of ours, or a finalizer, is under way in or around the innermost code of the script,
    so that it must not be entered again from a handler."""
    return _script_frame(frame) is not None


def _script_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of the script, or of a library of its, around functions of ours or a finalizer that an
    interrupt would cut in two; None if there are none."""
    is_within = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith((_OURS, _MODES)) or code is _FINALIZER:
            is_within = True
        elif not _is_neutral(code.co_filename):
            return frame if is_within else None
        frame = frame.f_back
    return None


def _is_neutral(filename: str) -> bool:
    """Returns whether code is of a library that we call as well as the script, so that what matters is who did."""
    if filename.startswith(("<frozen", _TORCH, *_CALLED_BY_US)):
        return True
    return filename.startswith(_STANDARD) and not filename.startswith(_PACKAGES)


class _Deferred:
    """An interrupt that is raised in a frame, after the call of ours that it is in or a later one.

    Args:
        frame: Of the script.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame, self._until_s = frame, time.monotonic() + _PATIENCE_S
        self._handlers = dis.Bytecode(frame.f_code).exception_entries  # type: ignore[attr-defined]
        self._before, self._is_call = frame.f_lasti, True

    def begin(self) -> None:
        """Has the frame be traced."""
        self._frame.f_trace, self._frame.f_trace_opcodes = self._in_script, True
        sys.settrace(self._on_call)

    def end(self) -> None:
        """Has nothing be traced."""
        sys.settrace(None)
        self._frame.f_trace, self._frame.f_trace_opcodes = None, False

    def _on_call(self, frame: FrameType, event: str, value: object) -> None:
        if frame.f_code is _between_turns.__code__ or time.monotonic() > self._until_s:
            self.end()
            raise KeyboardInterrupt

    def _in_script(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "line" or (event == "opcode" and not self._may_raise_before(frame.f_lasti)):
            return self._in_script
        self.end()
        interrupt = KeyboardInterrupt()
        interrupt.__context__ = value[1] if event == "exception" else None
        raise interrupt

    def _may_raise_before(self, instruction: int) -> bool:
        """Returns whether a call ended before an instruction, and an exception goes from here where it would from
        there."""
        may_raise = self._is_call and self._handler(self._before) == self._handler(instruction)
        name = dis.opname[self._frame.f_code.co_code[instruction]]
        self._before, self._is_call = instruction, name.startswith(("CALL", "JUMP_BACKWARD"))
        return may_raise

    def _handler(self, instruction: int) -> int | None:
        return next((entry.target for entry in self._handlers if entry.start <= instruction < entry.end), None)
