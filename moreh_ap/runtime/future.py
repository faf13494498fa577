"""The promise of a command's result.

Decides how a caller waits for workers: on an ordinary lock, so that Ctrl-C works and notebooks, where an event loop is
running, are no special case. Must not know where the result comes from.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

_logger = logging.getLogger(__name__)


class _Mesh(Protocol):
    def count_wait(self) -> None: ...

    def raise_pending(self, up_to: int | None) -> None: ...


class Reply:
    """What the workers will answer to one command, one entry a worker, in rank order."""

    def __init__(self, mesh: _Mesh, number: int) -> None:
        self._mesh = mesh
        self._number = number
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._values: list[Any] = []
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Reply], object]] = []

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._done.is_set()

    def failed(self) -> bool:
        """Whether the command is done and ended in an error. Never waits."""
        return self._done.is_set() and self._error is not None

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Returns the results, one a worker, in rank order; waits for them where it must.

        Raises:
            Exception: what a worker raised, in its own type, with the worker's traceback as `__cause__`; or such an
                error of an earlier command that nobody has been told of yet.
            WorkerLostError: a worker process died.
            TimeoutError: the command was not done in time; it goes on, and `result` may be called again.
        """
        self.wait(timeout_s)
        self._mesh.raise_pending(self._number)
        if self._error is not None:
            raise self._error
        return self._values

    def add_done_callback(self, callback: Callable[[Reply], object]) -> None:
        """Calls `callback(reply)` once the command is done: at once if it is, else in the thread that receives
        answers, which must not be kept waiting."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the command is done, however it ended.

        Raises:
            TimeoutError: it was not done in time.
        """
        if not self._done.is_set():
            self._mesh.count_wait()
            if not self._done.wait(timeout_s):
                raise TimeoutError(f"the workers have not answered within {timeout_s} s")

    def complete(self, values: list[Any], error: BaseException | None) -> None:
        """Sets the result, or the error. For the mesh, which calls this once."""
        with self._lock:
            self._values, self._error = values, error
            callbacks, self._callbacks = self._callbacks, []
            self._done.set()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # the receiving thread serves all replies and must go on
                _logger.exception("a callback of a worker's reply raised")
