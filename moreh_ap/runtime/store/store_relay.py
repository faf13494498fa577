"""The store through which the workers of several hosts meet, as those of one host reach it.

Decides how a worker's request reaches the controller, where the values are, and its answer the worker. The socket is a
file in a folder that only this user can enter: no port is open. Must not know what is asked.
"""

from __future__ import annotations

import itertools
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moreh_ap.hosts.channel import Channel, ChannelError, Message

SOCKET = "store"


class StoreRelay:
    """Listens for workers of this host.

    Args:
        folder: A folder that only this user can enter.
        start: Which workers of this host these are: those of an earlier start have ended, and are not answered.
        tell: Sends a message to the controller: its kind, its payload and its values.

    Attributes:
        path: The socket.
    """

    def __init__(self, folder: Path, start: int, tell: Callable[..., None]) -> None:
        self.path = str(folder / SOCKET)
        self._start, self._tell = start, tell
        self._numbers = itertools.count()
        self._waiting: dict[int, Channel] = {}
        relay = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                relay._serve(Channel(self.rfile, self.wfile))  # type: ignore[arg-type]

        self._server = socketserver.ThreadingUnixStreamServer(self.path, Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="moreh-store", daemon=True).start()

    def answer(self, message: Message) -> None:
        """Hands on what the controller answers."""
        values = dict(message.values)
        if values.pop("start") != self._start:
            return
        worker = self._waiting.pop(values.pop("request"), None)
        try:
            if worker is not None:
                worker.send("store", message.payload, **values)
        except OSError:  # it has stopped waiting
            return

    def close(self) -> None:
        """Accepts no further connections. Does not wait: the thread that accepts them polls now and then."""
        threading.Thread(target=self._close, daemon=True).start()

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, worker: Channel) -> None:
        while True:
            try:
                request = worker.receive()
            except ChannelError:
                return
            if request is None:
                return
            number = next(self._numbers)
            self._waiting[number] = worker
            values: dict[str, Any] = {**request.values, "request": number, "start": self._start}
            self._tell("store", request.payload, **values)
