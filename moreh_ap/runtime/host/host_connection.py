"""One other host, as the controller sees it.

Decides who gets what an agent says, and when the host counts as lost. Must not know how hosts are compared, nor what
their workers do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from moreh_ap.hosts import host_files, joining_checks
from moreh_ap.hosts.channel import BUSY, Channel, ChannelError, Message
from moreh_ap.hosts.host_list import public_name
from moreh_ap.hosts.host_report import HostReport
from moreh_ap.hosts.reachability import Speed
from moreh_ap.hosts.ways import Way
from moreh_ap.protocol.encoding import SentPlace
from moreh_ap.runtime.host.remote_agent import ALIVE_S, SILENCE_S

_LONGEST_TRANSFER_S = 600.0  # of one piece of a file


class HostLostError(Exception):
    """The connection to a host's agent has ended.

    Args:
        reason: What was seen.
        host: The host, as it was given.
    """

    def __init__(self, reason: str, host: str = "") -> None:
        super().__init__(reason)
        self.host = host


class HostConnection:
    """A connection to an agent that has begun to speak.

    Args:
        host: The host, as it was given.
        way: The streams to its agent.

    Attributes:
        name: The host, as a log may name it.
        report: What it said of itself.
        arrived_s: When that arrived, by the clock of this machine.
        delay_s: How long before it may have been said.
        address: Where the other hosts reach it.
        interface: Its network interface with that address.
        files: The folder there in which files that it is sent lie.
        given: The files that it was sent as they are here, each with its `script_files.identity_of` of then.
        serves: Whether it was asked to serve the engine.
        usage: What its workers use, as `WorkerUsage.look` said last; empty before.
        on_usage: Told that there is something new.
        sights: What its agent sees of its workers, as `SightsOfHost.look` said last; empty before.
        said: What its workers said of themselves when they were asked last; None: nothing yet.
        link: The link between it and the hosts that it joined during the run; None: it was there, or that is not known.
    """

    def __init__(self, host: str, way: Way) -> None:
        self.host, self.name = host, public_name(host)
        self.report = HostReport()
        self.arrived_s = self.delay_s = 0.0
        self.address = self.interface = self.files = ""
        self.given: dict[str, tuple[int, ...]] = {}
        self.serves = False
        self.on_message: Callable[[Message], None] = lambda message: None
        self.usage: Mapping[str, Any] = {}
        self.on_usage: Callable[[], object] = lambda: None
        self.sights: Mapping[str, Any] = {}
        self.said: list[list[Any]] | None = None
        self.link: Speed | None = None
        self._way = way
        self._channel = Channel(way.reader, way.writer)
        self._answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._lost: str | None = None
        self._closing = threading.Event()
        self._heard_s = self._began_s = time.monotonic()
        for name, target in (("moreh-host", self._receive), ("moreh-alive", self._stay_alive)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def ask(self, kind: str, timeout_s: float, **values: Any) -> Message:
        """Sends a request and returns its answer.

        Raises:
            HostLostError: The agent has ended, or does not answer in time.
        """
        with self._asking:
            self.send(kind, **values)
            return self._answer(timeout_s)

    def send(self, kind: str, payload: bytes = b"", **values: Any) -> None:
        """Sends a message that nothing answers.

        Raises:
            HostLostError: The agent has ended.
        """
        try:
            self._channel.send(kind, payload, **values)
        except (OSError, ValueError) as error:
            raise self._lost_error(str(error)) from error

    def await_report(self, timeout_s: float) -> None:
        """Waits for what the agent says first.

        Raises:
            HostLostError: It has not said it in time.
        """
        slow = "the host is busy, or reads Python from a slow disk"
        message = self._answer(timeout_s, f"{joining_checks.SILENT} in {timeout_s:.0f} s: {slow}")
        if message.kind == BUSY:
            busy = "its agent serves another script; it takes the next one when that has ended"
            raise HostLostError(busy, self.host)  # it ends the connection, too
        if message.kind != "report":
            said = f"the agent said {message.kind!r} where it should have said what the host has"
            raise HostLostError(said, self.host)
        self.report = HostReport.of(message.values)
        self.address = self._way.address or self.report.address

    def send_file(self, path: str, area: str, name: str) -> int:
        """Sends a file, piece by piece, and returns its bytes.

        Raises:
            HostLostError: The agent has ended.
            OSError: The file cannot be read here, or not be written there.
        """
        total, left = 0, os.path.getsize(path)
        with self._asking:
            for piece in host_files.pieces(path):
                left -= len(piece)
                is_first, total = total == 0, total + len(piece)
                self.send("file", piece, area=area, name=name, is_first=is_first, is_last=left <= 0)
                if left <= 0:
                    break
            error = self._answer(_LONGEST_TRANSFER_S).values["error"]
        if error:
            raise OSError(f"{self.name}: {error}")
        return total

    def take_file(self, name: str, path: str) -> str:
        """Moves what a worker there has written to this machine, piece by piece, and returns its digest.

        Args:
            name: Its name there.
            path: The new file here, which is on the disk when this returns.

        Raises:
            HostLostError: The agent has ended.
            OSError: The file cannot be read there, or not be written here.
        """
        found, start = hashlib.sha256(), 0
        with open(path, "xb") as file:
            while True:
                answer = self.ask("piece", _LONGEST_TRANSFER_S, name=name, start=start)
                if answer.values["error"]:
                    raise OSError(f"{self.name}: {answer.values['error']}")
                if not answer.payload:
                    break
                file.write(answer.payload)
                found.update(answer.payload)
                start += len(answer.payload)
            file.flush()
            os.fsync(file.fileno())
        self.remove_file(name)
        return found.hexdigest()

    def take_files(self, written: Mapping[int, tuple[str, str]]) -> list[tuple[int, str]]:
        """Moves what workers there have written to this machine, and returns the digest of each, with its rank.

        Args:
            written: By rank the path there, and the path here; where that is empty, the file is only removed.

        Raises:
            HostLostError: The agent has ended.
            OSError: A file cannot be read there, or not be written here.
        """
        digests = []
        for rank, (there, here) in written.items():
            name = os.path.basename(there)
            if here:
                digests.append((rank, self.take_file(name, here)))
            else:
                self.remove_file(name)
        return digests

    def remove_file(self, name: str) -> None:
        """Removes what a worker there has written.

        Raises:
            HostLostError: The agent has ended.
        """
        self.send("remove", name=name)

    def read_value(self, place: SentPlace) -> bytes:
        """Returns a value that this process has sent to the memory of the host's workers, piece by piece.

        Raises:
            OSError: The host had no memory for it, or is lost.
        """
        found = bytearray()
        while len(found) < place.num_bytes:
            asked = {
                "start": place.start + len(found),
                "num_bytes": min(host_files.PIECE_BYTES, place.num_bytes - len(found)),
            }
            try:
                answer = self.ask("value", _LONGEST_TRANSFER_S, number=place.number, **asked)
            except HostLostError as error:
                raise OSError(f"{self.name}: {error}") from error
            if answer.values["error"] or not answer.payload:
                raise OSError(f"{self.name}: {answer.values['error'] or 'nothing is there'}")
            found += answer.payload
        return bytes(found)

    @property
    def room_for_copies(self) -> int:
        """Bytes that are free there for copies of what workers hold, with what these have taken, when it spoke last: at
        most some seconds ago once it has workers."""
        return int(self.usage.get("room_for_copies", self.report.free_memory_bytes))

    def lost(self) -> str | None:
        """Returns why the host cannot be used any longer, None while it can."""
        return self._lost

    def give_up(self, reason: str) -> None:
        """Counts the host as lost."""
        self._lost = self._lost or reason
        self._answers.put(None)

    def end(self) -> None:
        """Has the agent end its workers and itself, and waits for that."""
        self._closing.set()
        with contextlib.suppress(HostLostError):
            self.send("end")
        self._way.close()

    def end_soon(self) -> None:
        """Does the same without waiting, for a host that is lost or not used any more."""
        threading.Thread(target=self.end, name="moreh-lost", daemon=True).start()

    def _answer(self, timeout_s: float, why_none: str = "") -> Message:
        try:
            message = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.give_up(why_none or f"no answer in {timeout_s:.0f} s")  # a later one would be taken for the next
            raise self._lost_error("") from None
        if message is None:
            self._answers.put(None)  # for the next request
            raise self._lost_error(joining_checks.ENDED)
        return message

    def _lost_error(self, reason: str) -> HostLostError:
        """Returns the error of why the host is lost, `reason` if that is not known."""
        return HostLostError(self._lost or reason, self.host)

    def _receive(self) -> None:
        reason = ""
        while True:
            try:
                message = self._channel.receive()
            except ChannelError as error:
                reason = f"not an agent's answer: {error}"
                break
            if message is None:
                break
            self._heard_s = time.monotonic()
            if message.kind in _UNASKED:
                self.on_message(message)
            elif message.kind == "alive":
                self.usage, self.sights = message.values.get("usage", {}), message.values.get("sights", {})
                self.on_usage()
            elif message.kind == "stacks":
                self.said = message.values["said"]
            else:
                if message.kind == "report":
                    self.arrived_s, self.delay_s = time.time(), self._heard_s - self._began_s
                self._answers.put(message)
        if not self._closing.is_set() and not reason:
            reason = self._way.last_words()
        self._lost = self._lost or reason or joining_checks.ENDED
        self._answers.put(None)

    def _stay_alive(self) -> None:
        while self._lost is None and not self._closing.wait(ALIVE_S):
            if time.monotonic() - self._heard_s > SILENCE_S:
                self.give_up(f"nothing was heard of it for {SILENCE_S:g} s")
            with contextlib.suppress(HostLostError):  # `_receive` notices too
                self.send("alive")


_UNASKED = ("output", "pid", "exit", "store", "serving", "warm")
