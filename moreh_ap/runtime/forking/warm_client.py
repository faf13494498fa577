"""The program that the engine starts and watches in place of a worker: `warm_client.py SOCKET AGENT LAUNCH -m ENGINE`.

The engine starts this process and waits for its end; the worker itself is forked by the warm parent (`warm_parent`),
which is asked here. Decides that signals, deaths and exit codes go both ways, that the worker ends with the agent, and
that where no warm parent answers it starts in this process and imports everything itself. It runs without `site`, so it
imports what Python brings.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_COLLECTED_S = 4.0  # the first process of the system may take a second, and in some containers it never collects any


def main(path: str, agent: int, arguments: list[str]) -> None:
    """Ends as the worker ends, or becomes the worker.

    Args:
        path: Where the warm parent listens.
        agent: Process id of the agent, in which the engine has started this process.
        arguments: What the worker's bootstrap module is given.
    """
    parent = socket.socket(socket.AF_UNIX)
    pid = _ask(parent, path, arguments)
    if pid is None:
        os.execv(sys.executable, [sys.executable, "-m", "moreh_ap.runtime.bootstrap", *arguments])
    worker = None
    with suppress(ProcessLookupError):  # it has been collected already; the parent says how it ended
        worker = os.pidfd_open(pid)

        def forward(number: int, frame: object) -> None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, number)

        for number in _FORWARDED:
            signal.signal(number, forward)
    _await_line(parent, agent)
    status = _line(parent)
    if status is None and worker is not None:  # the warm parent is gone
        _await_end(worker)
    _end(-signal.SIGKILL if status is None else os.waitstatus_to_exitcode(int(status)))


def _ask(parent: socket.socket, path: str, arguments: list[str]) -> int | None:
    """Returns the process id of the worker that the warm parent has forked; None if there is no warm parent."""
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ)}).encode()
    try:
        parent.connect(path)
        parent.sendall(len(request).to_bytes(4, "big") + request)
    except OSError:
        return None
    line = _line(parent)
    return None if line is None else int(line)


def _line(parent: socket.socket) -> str | None:
    """Returns the next line from the warm parent, None if it has ended."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            part = parent.recv(1)
        except OSError:
            return None
        if not part:
            return None
        line += part
    return line.decode()


def _await_line(parent: socket.socket, agent: int) -> None:
    """Waits for the next line from the warm parent, or its end. Ends with the agent: then the warm parent kills the
    worker."""
    try:
        watched = os.pidfd_open(agent)
    except ProcessLookupError:
        _end(-signal.SIGKILL)
    if os.getppid() != agent or watched in select.select([parent.fileno(), watched], [], [])[0]:
        _end(-signal.SIGKILL)
    os.close(watched)


def _await_end(worker: int) -> None:
    """Waits until a worker without a parent, which the kernel kills, has been collected: the engine hears of it after
    the controller can see it."""
    deadline_s = time.monotonic() + _COLLECTED_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline_s:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
            time.sleep(0.02)


def _end(code: int) -> None:
    """Ends this process as the worker ended: by the same signal, without a core of its own, or with its exit code."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # some signals have no other handling
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
