"""The thread of a GPU's worker that sends its answers.

Decides that answers leave in the order in which their commands were executed. Must not know what they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue


class AnsweringThread:
    """Sends answers beside the thread that executes commands. See [Note: answers of a GPU] in `late_replies.py`."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="moreh-answers", daemon=True).start()

    def put(self, send: Callable[[], None]) -> None:
        """Has `send` called after all that was put before it."""
        self._waiting.put(send)

    def _run(self) -> None:
        while True:
            send = self._waiting.get()
            with contextlib.suppress(OSError):  # who takes the answers has ended: what supervises this process ends it
                send()
