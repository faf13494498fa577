"""What the workers of another host say through inherited descriptors.

Decides how their output, their process ids and their ends reach the controller. Must not know what carries messages.
"""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable, Sequence

from moreh_ap.runtime.child_process import Child

_POLL_S = 0.1
_STREAMS = ("stdout", "stderr")


class WorkerPipes:
    """Pipes that the workers of this host inherit.

    Args:
        ranks: The workers.
        tell: Called with the kind of a message, its payload and its values.
    """

    def __init__(self, ranks: Sequence[int], tell: Callable[..., None]) -> None:
        self._tell = tell
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}
        self._looked, self._num_looks = threading.Condition(), 0
        self.pid_fd = self._pipe(None)
        self.streams = {rank: [self._pipe((rank, name)) for name in _STREAMS] for rank in ranks}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moreh-output", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that runs."""
        return {rank: child.pid for rank, child in list(self._children.items())}

    def close(self) -> None:
        """Passes on what has been printed so far, after the workers are gone."""
        self._ending.set()
        if threading.current_thread() is not self._thread:  # which ends the process where the controller is gone
            self._thread.join(2.0)

    def await_ends(self, timeout_s: float) -> bool:
        """Waits until no worker lives and all that they have said of themselves has been told; returns whether it is.

        The thread has to look once more, from the start: what it looks at now it may have looked at too early.
        """
        with self._looked:
            wanted = self._num_looks + 2
            return self._looked.wait_for(lambda: self._num_looks >= wanted and not self._children, timeout_s)

    def _pipe(self, source: tuple[int, str] | None) -> int:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_inheritable(writer, True)
        self._selector.register(reader, selectors.EVENT_READ, source)
        return writer

    def _run(self) -> None:
        while not self._ending.is_set():
            self._read(_POLL_S)
            self._look_after()
            with self._looked:
                self._num_looks += 1
                self._looked.notify_all()
        while self._read(0.0):
            pass
        self._look_after()

    def _read(self, timeout_s: float) -> bool:
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            data = os.read(key.fd, 65536)
            if key.data is not None:
                self._tell("output", data, rank=key.data[0], name=key.data[1])
                continue
            for rank, pid in (map(int, line.split()) for line in data.decode().splitlines()):
                self._children[rank] = Child(pid)
                self._tell("pid", rank=rank, pid=pid)
        return bool(ready)

    def _look_after(self) -> None:
        for rank, child in list(self._children.items()):
            if not child.is_alive():
                self._tell("exit", rank=rank, code=child.exit_code())
                del self._children[rank]
