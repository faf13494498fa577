"""The controller's part on one machine: a connection to each worker, on which commands go and answers come.

Decides which bytes go to which worker, and when all have answered. Must not know commands, nor the engine.

[Note: one reader]
The thread that waits for answers reads the connections itself, all of them, whichever command it waits for. So an
answer wakes one thread, and no thread runs while none waits. It sleeps until the first worker has answered that has not
yet, and then reads what others have sent meanwhile: few of many answers wake it. The end of a connection is no news:
whoever waits looks after the processes anyway, and knows how one ended.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

from moreh_ap.protocol.encoding import Packed
from moreh_ap.runtime.engine_error import EngineError
from moreh_ap.runtime.relay.frames import COMMAND, FAILURE, Arriving, Sender, SocketOutgoing, written
from moreh_ap.runtime.relay.worker_answer import Answer
from moreh_ap.runtime.worker.actor import Trouble

_CONNECT_S = 10.0  # workers that have joined each other have connected before
_END_S = 10.0  # a process whose connection has ended is seen to be gone long before


class LinkedAnswers:
    """The answers to one command, on their way.

    Args:
        links: What reads them.
        count: How many workers answer.

    Attributes:
        answers: In rank order; None where one is not there yet.
        num_left: How many are not there yet.
    """

    def __init__(self, links: WorkerLinks, count: int) -> None:
        self.answers: list[Any] = [None] * count
        self.num_left = count
        self._links = links

    def wait(self, timeout_s: float) -> Sequence[Answer]:
        """Returns the answers in rank order. May be called again after a time-out; one thread at a time calls it.

        Raises:
            TimeoutError: Not all answers are in.
            EngineError: A worker has ended its connection, and its process seems to live.
        """
        if self.num_left:
            self._links.read_for(self, timeout_s)
        return self.answers


class WorkerLinks:
    """Connections to all workers. See [Note: one reader].

    Args:
        path: Where workers connect, in a folder that only this user can enter.
        num_workers: How many there will be.
    """

    def __init__(self, path: str, num_workers: int) -> None:
        self.path, self._num_workers = path, num_workers
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(num_workers)
        self._listener.settimeout(_CONNECT_S)
        self._sockets: list[socket.socket] = []
        self._senders: list[Sender] = []
        self._readers: dict[int, tuple[int, Arriving]] = {}  # by descriptor: rank, and what arrives
        self._poll = select.poll()  # all connections
        self._alone: dict[int, select.poll] = {}  # the connection of each rank
        self._waiting: dict[int, LinkedAnswers] = {}
        self._troubles: tuple[Trouble, ...] = ()
        self._first_end_s: float | None = None

    def let_in(self) -> None:
        """Takes the connections of the workers, which have joined each other.

        Raises:
            EngineError: One has not connected.
        """
        senders: dict[int, Sender] = {}
        while len(senders) < self._num_workers:
            try:
                plain, _ = self._listener.accept()
            except OSError as error:
                missing = sorted(set(range(self._num_workers)) - set(senders))
                raise EngineError(f"workers {missing} take no commands: {error}") from error
            arriving = Arriving(plain)
            rank = self._rank_of(plain, arriving)
            if rank is None:
                plain.close()
                continue
            self._sockets.append(plain)
            senders[rank] = Sender(SocketOutgoing(plain))
            self._readers[plain.fileno()] = rank, arriving
            self._poll.register(plain, select.POLLIN)
            self._alone[rank] = select.poll()
            self._alone[rank].register(plain, select.POLLIN)
        self._listener.close()
        self._senders = [senders[rank] for rank in range(self._num_workers)]

    @staticmethod
    def _rank_of(plain: socket.socket, arriving: Arriving) -> int | None:
        """Returns which worker has connected; None if it does not say so."""
        poll = select.poll()
        poll.register(plain, select.POLLIN)
        while poll.poll(_CONNECT_S * 1e3) and (frames := arriving.take()) is not None:
            if frames:
                return frames[0].number
        return None

    def execute(self, number: int, epoch: int, command: Packed | Sequence[Packed]) -> LinkedAnswers:
        """Sends one command to all workers, or each its own."""
        pending = self._waiting[number] = LinkedAnswers(self, self._num_workers)
        if isinstance(command, Packed):
            frame = written(COMMAND, number, epoch, [pickle.dumps(tuple(command), protocol=5)])
            for sender in self._senders:
                sender.send_written(frame)
        else:
            for sender, own in zip(self._senders, command, strict=True):
                sender.send(COMMAND, number, epoch, [pickle.dumps(tuple(own), protocol=5)])
        return pending

    def answered(self, number: int) -> Sequence[bool]:
        """Returns by rank whether a worker has answered a command."""
        waiting = self._waiting.get(number)
        return () if waiting is None else [answer is not None for answer in waiting.answers]

    def troubles(self) -> Sequence[Trouble]:
        """Returns the latest failures of workers, one more than there are workers."""
        return self._troubles

    def read_for(self, awaited: LinkedAnswers, timeout_s: float) -> None:
        """Reads what arrives until the answers to one command are in. See [Note: one reader].

        Raises:
            TimeoutError: They are not in after `timeout_s`.
            EngineError: A connection ended a while ago.
        """
        deadline_s = time.monotonic() + timeout_s
        while awaited.num_left:
            first = self._alone.get(awaited.answers.index(None), self._poll)
            is_late = not first.poll(max(0.0, deadline_s - time.monotonic()) * 1e3)
            for descriptor, _ in self._poll.poll(0):
                rank, arriving = self._readers[descriptor]
                frames = arriving.take()
                if frames is None:
                    self._poll.unregister(descriptor)
                    del self._alone[rank]
                    self._first_end_s = self._first_end_s or time.monotonic()
                    continue
                for frame in frames:
                    answer = pickle.loads(frame.parts[0])
                    if frame.kind == FAILURE:
                        trouble = Trouble(frame.number, frame.epoch, answer)
                        self._troubles = (*self._troubles[-self._num_workers :], trouble)
                    pending = self._waiting[frame.number]
                    pending.answers[rank] = answer
                    pending.num_left -= 1
                    if not pending.num_left:
                        del self._waiting[frame.number]
            if is_late and awaited.num_left:
                if self._first_end_s is not None and time.monotonic() - self._first_end_s > _END_S:
                    raise EngineError("a worker has ended its connection")
                raise TimeoutError

    def close(self) -> None:
        """Ends the connections."""
        self._listener.close()
        for sender in self._senders:
            sender.close()
        for plain in self._sockets:
            with contextlib.suppress(OSError):  # the worker has ended
                plain.shutdown(socket.SHUT_RDWR)
            plain.close()
