"""PyTorch's store for workers on several hosts.

Decides how an operation becomes a message to the agent of this host, which passes it on to the controller. Must not
know what a store is used for. No port is open for it, as `TCPStore` would have one that any process could use.
"""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from moreh_ap.hosts.channel import Channel, Message


class HostStore(dist.Store):
    """A store behind a socket.

    Args:
        path: The agent's socket.
        timeout: How long a key may be waited for.

    Each thread that uses it has a connection of its own, since one may wait while another sets. PyTorch does not keep
    the Python half of a store alive: the process that makes it does.
    """

    def __init__(self, path: str, timeout: datetime.timedelta) -> None:
        super().__init__()
        self._path, self._timeout = path, timeout
        self._connections = threading.local()
        self._clones: list[HostStore] = []

    def clone(self) -> HostStore:
        made = HostStore(self._path, self._timeout)
        self._clones.append(made)
        return made

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        super().set_timeout(timeout)
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_bytes(value), op="set", key=key)

    def get(self, key: str) -> bytes:
        return self._ask(op="get", key=key).payload

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(op="add", key=key, amount=amount).values["number"])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected = _bytes(expected_value)
        payload = expected + _bytes(desired_value)
        return self._ask(payload, op="compare_set", key=key, num_expected_bytes=len(expected)).payload

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(op="check", keys=list(keys)).values["found"])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._ask(op="wait", keys=list(keys), timeout=timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(op="delete_key", key=key).values["found"])

    def num_keys(self) -> int:
        return int(self._ask(op="num_keys").values["number"])

    def _ask(self, payload: bytes = b"", *, timeout: datetime.timedelta | None = None, **values: Any) -> Message:
        timeout_s = (timeout or self._timeout).total_seconds()
        connection = self._connection()
        connection.settimeout(timeout_s)
        channel: Channel = self._connections.channel
        channel.send("store", payload, **values)
        answer = channel.receive()
        if answer is None:  # a late answer must not be taken for that of the next question
            connection.close()
            del self._connections.socket
            waited = values.get("keys", [values.get("key")])
            raise dist.DistStoreError(f"no answer from the store within {timeout_s:g} s: {values['op']} {waited}")
        return answer

    def _connection(self) -> socket.socket:
        connection: socket.socket | None = getattr(self._connections, "socket", None)
        if connection is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self._path)
            self._connections.socket = connection
            self._connections.channel = Channel(connection.makefile("rb"), connection.makefile("wb"))
        return connection


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
