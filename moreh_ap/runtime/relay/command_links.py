"""The controller's part: one message to each of a few hosts for a command, and one answer of each.

Decides which bytes go to which host, and when all have answered. Must not know commands, nor the engine.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import BinaryIO, cast

from moreh_ap.hosts.tls_stream import TlsStream
from moreh_ap.protocol.encoding import Packed
from moreh_ap.runtime.engine_error import EngineError
from moreh_ap.runtime.relay import fan_out
from moreh_ap.runtime.relay.answers import JoinedAnswers
from moreh_ap.runtime.relay.frames import ALL_HOSTS, BRANCH, COMMAND, ENDED, FAILURE, VALUE, Frame, Sender, read
from moreh_ap.runtime.relay.worker_values import WorkerAnswers, first_answer
from moreh_ap.runtime.worker.actor import Trouble

_MOST_TROUBLES = 1 << 12


class HostAnswers(JoinedAnswers):
    """The answers to one command, on their way."""

    answers = ()  # of single workers

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__(counts)
        self._arrived = threading.Lock()
        self._arrived.acquire()
        self._answers: WorkerAnswers | None = None

    def take(self, source: int, parts: list[bytes]) -> bool:
        """Takes the answer of a source; returns whether all are in. One thread at a time calls it."""
        is_last = super().take(source, parts)
        if is_last:
            self._arrived.release()
        return is_last

    def wait(self, timeout_s: float) -> WorkerAnswers:
        """Returns the answers in rank order. May be called again after a time-out.

        Raises:
            TimeoutError: Not all answers are in.
        """
        if self._answers is None:
            if not self._arrived.acquire(timeout=timeout_s):
                raise TimeoutError
            self._answers = WorkerAnswers(self)
        return self._answers


class CommandLinks:
    """Connections to the relays of hosts, which hand on to the others.

    Args:
        places: Address and port of the relay of every host, in rank order.
        per_host: Workers of each.
        context: What certificates are shown and asked for.
        on_end: Told the host, by its index, whose connection has ended, and why if that is known.
        most: Hosts that one talks to at most.

    Attributes:
        num_received: Frames that have arrived.

    Raises:
        EngineError: One cannot be reached.
    """

    def __init__(
        self,
        places: Sequence[tuple[str, int]],
        per_host: int,
        context: ssl.SSLContext,
        on_end: Callable[[int, str], object],
        most: int = fan_out.FAN_OUT,
    ) -> None:
        self.num_received = 0
        self._on_end, self._is_closed = on_end, False
        self._lock = threading.Lock()
        self._waiting: dict[int, HostAnswers] = {}
        self._troubles: list[Trouble] = []
        self._branches = fan_out.branches_of(places, most)
        self._counts = [branch.num_hosts * per_host for branch in self._branches]
        self._streams: list[TlsStream] = []
        self._senders: list[Sender] = []
        for branch in self._branches:
            try:
                self._streams.append(fan_out.connect(branch, context))
            except OSError as error:
                self.close()
                raise EngineError(f"the agent at {branch.address} takes no commands: {error}") from error
            self._senders.append(Sender(self._streams[-1]))
            self._senders[-1].send(BRANCH, 0, 0, [fan_out.packed(branch)])
        for index in range(len(self._branches)):
            threading.Thread(target=self._follow, args=(index,), name="moreh-answers", daemon=True).start()

    @property
    def num_sent(self) -> int:
        """Frames that were sent."""
        return sum(sender.num_sent for sender in self._senders)

    def execute(self, number: int, epoch: int, command: Packed | Sequence[Packed]) -> HostAnswers:
        """Sends one command to all workers, or each its own."""
        pending = HostAnswers(self._counts)
        with self._lock:
            self._waiting[number] = pending
        commands = [command] if isinstance(command, Packed) else command
        parts, begin = [pickle.dumps(tuple(one), protocol=5) for one in commands], 0
        for sender, count in zip(self._senders, self._counts):
            sender.send(COMMAND, number, epoch, parts if len(parts) == 1 else parts[begin : begin + count])
            begin += count
        return pending

    def keep(self, host: int | None, number: int, start: int, value: bytes | memoryview) -> None:
        """Sends a host, or all of them, a value for this place of its memory, before the command that names it."""
        for branch, sender in zip(self._branches, self._senders):
            if host is None or branch.has(host):
                only = ALL_HOSTS if host is None else host
                sender.send(VALUE, number, only, [start.to_bytes(8, "little"), value])

    def answered(self, number: int) -> Sequence[bool]:
        """Returns nothing: hosts answer for all their workers at once; `workers_of_hosts.py` knows who is silent."""
        return ()

    def troubles(self) -> Sequence[Trouble]:
        """Returns the failures that hosts have reported, which they do at once."""
        return self._troubles

    def close(self) -> None:
        """Ends the connections without a call of `on_end`."""
        self._is_closed = True
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.shut()
        for sender in self._senders:
            sender.close()

    def _follow(self, index: int) -> None:
        reader = cast("BinaryIO", io.BufferedReader(self._streams[index], 1 << 16))
        while (frame := read(reader)) is not None:
            self._take(index, frame)
        if not self._is_closed:
            self._on_end(self._branches[index].first, "")
        self._streams[index].close()

    def _take(self, index: int, frame: Frame) -> None:
        if frame.kind == ENDED:
            if not self._is_closed:
                self._on_end(frame.number, frame.parts[0].decode())
            return
        with self._lock:
            self.num_received += 1
            if frame.kind == FAILURE:
                answer = first_answer(frame.parts)
                self._troubles = [*self._troubles[-_MOST_TROUBLES:], Trouble(frame.number, frame.epoch, answer)]
            elif self._waiting[frame.number].take(index, frame.parts):
                del self._waiting[frame.number]
