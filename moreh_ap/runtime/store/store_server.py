"""The values through which the workers of several hosts meet, in the controller.

Decides what each operation of PyTorch's store does. Must not know what carries requests. Never waits: who asks for a
key that is not there is answered once it is; how long that may take is decided by who asks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError

Answer = Callable[..., None]
"""Called with the bytes of an answer, and its values by name."""


class StoreServer:
    """A store. Source: torch/csrc/distributed/c10d/Store.hpp, TCPStore.cpp.

    Args:
        start: The start of the workers that meet here.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[list[str], Callable[[], None]]] = []
        self._lock = threading.Lock()

    def ask_from(self, host: HostConnection, values: dict[str, Any], payload: bytes) -> None:
        """Executes what a worker of a host asks, unless it is one of another start, which has ended."""
        request, start = values.pop("request"), values.pop("start")
        if start != self._start:
            return

        def answer(payload: bytes, **found: Any) -> None:
            with contextlib.suppress(HostLostError):  # who looks after the host says so
                host.send("store", payload, request=request, start=start, **found)

        self.ask(values, payload, answer)

    def ask(self, request: dict[str, Any], payload: bytes, answer: Answer) -> None:
        """Executes a request and answers it, at once or later.

        Args:
            request: "op", and what it needs: "key", "keys", "amount", "num_expected_bytes".
            payload: Bytes of the value.
            answer: Takes the answer.

        Raises:
            ValueError: There is no such operation.
        """
        operation, key = request["op"], request.get("key", "")
        values = self._values
        with self._lock:
            if operation == "set":
                values[key] = payload
                answer(b"")
            elif operation == "get":
                self._when_there([key], lambda: answer(values[key]))
            elif operation == "wait":
                self._when_there(request["keys"], lambda: answer(b""))
            elif operation == "add":
                number = int(values.get(key, b"0")) + request["amount"]
                values[key] = str(number).encode()
                answer(b"", number=number)
            elif operation == "compare_set":
                answer(self._compare_set(key, payload, request["num_expected_bytes"]))
            elif operation == "check":
                answer(b"", found=all(one in values for one in request["keys"]))
            elif operation == "delete_key":
                answer(b"", found=values.pop(key, None) is not None)
            elif operation == "num_keys":
                answer(b"", number=len(values))
            else:
                raise ValueError(f"a store cannot {operation}")
            self._look_again()

    def _compare_set(self, key: str, payload: bytes, num_expected_bytes: int) -> bytes:
        expected, desired = payload[:num_expected_bytes], payload[num_expected_bytes:]
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def _when_there(self, keys: list[str], answer: Callable[[], None]) -> None:
        self._waiting.append((keys, answer))

    def _look_again(self) -> None:
        still = []
        for keys, answer in self._waiting:
            if all(key in self._values for key in keys):
                answer()
            else:
                still.append((keys, answer))
        self._waiting = still
