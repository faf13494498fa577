"""The warm parent of this machine, as the controller sees it.

Decides how it is told what to import, whether it can fork workers, and that it ends. Must not know the agent that
starts it, which may end before it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

from moreh_ap.runtime.forking.early_imports import EarlyImports
from moreh_ap.runtime.host.private_sockets import run_folder

_POLL_S = 0.1


class WarmParentProcess:
    """A warm parent that the first agent starts; see [Note: warm parent] in `warm_parent.py`.

    Args:
        imports: Modules that all workers need; one of a library that the script has not imported, when it does.

    Attributes:
        path: Where it listens.
    """

    def __init__(self, imports: Sequence[str]) -> None:
        self.path = str(run_folder() / f"warm-{uuid.uuid4().hex[:8]}")
        self._ours, theirs = socket.socketpair()
        self._theirs: socket.socket | None = theirs  # until it is started
        self._imports = EarlyImports(imports, self._tell)
        self._process: int | None = None  # a descriptor, once it can fork

    def to_start(self) -> tuple[str, tuple[str, ...], int]:
        """Returns socket, modules and a descriptor to inherit for the agent that starts it; no socket if one has."""
        return ("", (), -1) if self._theirs is None else (self.path, self._imports.now, self._theirs.fileno())

    def started(self) -> None:
        """Is told that an agent runs that starts it, or that needs none."""
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None
            self._imports.begin()

    def await_imports(self, is_stopping: Callable[[], bool]) -> None:
        """Waits until it has imported what workers need, or has ended; the engine waits 30 s at most."""
        while self._process is None and not self._says_something(_POLL_S):
            if is_stopping():
                return
        self._imports.stop()
        self._listen()

    def can_fork(self) -> bool:
        """Returns whether it can fork workers: it has imported what they need, and lives."""
        self._listen()
        return self._process is not None and not _has_ended(self._process)

    def was_lost(self) -> bool:
        """Returns whether it has ended after it could fork workers."""
        self._listen()
        return self._process is not None and _has_ended(self._process)

    def end(self) -> None:
        """Ends it once its agent has ended; the kernel ends the workers with it."""
        self._listen()
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = None
        self._imports.stop()
        self._ours.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def _tell(self, module: str) -> None:
        with suppress(OSError):  # it has ended, or is ready: each worker imports the module itself
            self._ours.sendall(f"{module}\n".encode())

    def _says_something(self, timeout_s: float) -> bool:
        return _is_readable(self._ours.fileno(), timeout_s)

    def _listen(self) -> None:
        """Takes the process id that it tells when it can fork."""
        if self._process is None and self._says_something(0.0):
            told = self._ours.recv(32)  # nothing: it has ended
            with suppress(ProcessLookupError):
                self._process = os.pidfd_open(int(told)) if told else None


def _has_ended(process: int) -> bool:
    return _is_readable(process, 0.0)


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()  # `select` takes no descriptors above 1023, and this is asked for late in a script
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))
