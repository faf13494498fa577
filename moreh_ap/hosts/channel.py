"""Messages between the controller and a host's agent, over any two streams of bytes.

Decides how a message is written: its kind and values as one line of JSON, then as many bytes as the line says, and the
end of a line, for which srun waits. Must not know what messages mean, nor what carries the streams: ssh, srun, a pipe,
TLS.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any, BinaryIO

BUSY = "busy"
"""The kind of the only message of an agent that serves another script."""

_LONGEST_LINE_BYTES = 1 << 24
_LARGEST_PAYLOAD_BYTES = 1 << 28


class ChannelError(Exception):
    """What has arrived is no message, such as what a login shell prints."""


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: What it is about.
        values: Its values, by name.
        payload: Bytes that belong to it.
    """

    kind: str
    values: dict[str, Any]
    payload: bytes = b""


class Channel:
    """Both directions between two programs. Any thread may send; one thread at a time receives."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader, self._writer = reader, writer
        self._lock = threading.Lock()

    def send(self, kind: str, payload: bytes = b"", **values: Any) -> None:
        """Sends a message.

        Raises:
            OSError: The other side is gone.
        """
        line = json.dumps({"kind": kind, "bytes": len(payload), **values}, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._writer.write(line)
            if payload:
                self._writer.write(payload)
                self._writer.write(b"\n")
            self._writer.flush()

    def receive(self) -> Message | None:
        """Returns the next message, None where the other side has ended.

        Raises:
            ChannelError: What has arrived is no message.
        """
        try:
            line = self._reader.readline(_LONGEST_LINE_BYTES)
        except (OSError, ValueError):  # the connection broke, or this side has closed it
            return None
        if not line:
            return None
        try:
            values = json.loads(line)
            kind, num_bytes = str(values.pop("kind")), int(values.pop("bytes"))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ChannelError(line[:200].decode(errors="replace").strip()) from error
        if not 0 <= num_bytes <= _LARGEST_PAYLOAD_BYTES:
            raise ChannelError(f"a message of {num_bytes} bytes")
        try:
            payload = self._reader.read(num_bytes + 1) if num_bytes else b"\n"
        except (OSError, ValueError):
            return None
        return Message(kind, values, payload[:-1]) if payload[-1:] == b"\n" and len(payload) > num_bytes else None
