"""The worker's part: takes commands from the controller of this machine or the agent of its host, and answers.

Decides how a worker connects. Must not know commands, nor how they are executed.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from moreh_ap.runtime.relay.frames import ANSWER, FAILURE, HELLO, Frame, read, written


class CommandSocket:
    """A connection to what sends commands.

    Args:
        path: Its socket.
        index: Which of the host's workers this one is.

    Raises:
        OSError: The other side has ended.
    """

    def __init__(self, path: str, index: int) -> None:
        self._plain = socket.socket(socket.AF_UNIX)
        self._plain.connect(path)
        self._plain.sendall(written(HELLO, index, 0, []))
        self._reader = self._plain.makefile("rb")

    def receive(self) -> Frame | None:
        """Waits for the next frame; None where the other side has ended."""
        return read(self._reader)

    def answer(self, command: Frame, parts: Sequence[bytes], *, has_failed: bool) -> None:
        """Answers a command.

        Args:
            command: The command.
            parts: As `written_answers.py` writes them.
            has_failed: Whether it raised.

        Raises:
            OSError: The other side has ended.
        """
        kind = FAILURE if has_failed else ANSWER
        self._plain.sendall(written(kind, command.number, command.epoch, parts))
