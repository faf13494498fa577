"""The output of workers, shown once in the controller's own output.

Decides which lines reach the user: everything of worker 0, and of the others only what worker 0 did not print too,
with the worker's number in front. Goes through `sys.stdout` and `sys.stderr`, so that it appears in notebooks. Must not
know who starts the workers; it hands out file descriptors.
"""

from __future__ import annotations

import codecs
import os
import re
import selectors
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

# How long a line of another worker may wait for the same line of worker 0.
HOLD_S = 1.0
_MAX_REMEMBERED = 1000
_TAIL_LINES = 50  # a native crash takes about thirty

# PyTorch's native log lines carry rank and time: "[rank1]:[W1121 05:09:00.123456 Some.cpp:12] text".
_TORCH_LOG_PREFIX = re.compile(r"^\[rank\d+\]:\[([A-Z])\d+ [\d:.]+ ")


def _comparable(line: str) -> str:
    return _TORCH_LOG_PREFIX.sub(r"[\1 ", line).rstrip()


class _Comparison:
    """Lines of one worker beside those of worker 0, on one of the two streams."""

    def __init__(self) -> None:
        self._expected: Counter[str] = Counter()  # printed by worker 0, not yet by this one
        self._order: deque[str] = deque()
        self._held: deque[tuple[float, str]] = deque()  # printed by this one, not yet by worker 0

    def first_worker_printed(self, line: str) -> None:
        for index, (_, held) in enumerate(self._held):
            if held == line or _comparable(held) == _comparable(line):
                del self._held[index]
                return
        self._expected[_comparable(line)] += 1
        self._order.append(_comparable(line))
        if len(self._order) > _MAX_REMEMBERED:
            self._forget(self._order.popleft())

    def printed(self, line: str, now_s: float) -> None:
        if self._expected[_comparable(line)] > 0:
            self._forget(_comparable(line))
        else:
            self._held.append((now_s, line))

    def _forget(self, line: str) -> None:
        self._expected[line] -= 1
        if self._expected[line] <= 0:
            del self._expected[line]

    def differing(self, before_s: float) -> list[str]:
        """Returns and forgets the lines held since `before_s` or longer: worker 0 did not print them."""
        lines = []
        while self._held and self._held[0][0] <= before_s:
            lines.append(self._held.popleft()[1])
        return lines


class _Stream:
    """One of the two output streams of one worker."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self.partial = ""
        self.comparison = _Comparison()

    def take_lines(self, text: str, final: bool) -> list[str]:
        """Returns the whole lines, without their ends, that `text` completes. A carriage return ends a line too."""
        lines = re.split(r"\r\n|\n|\r", self.partial + text)
        self.partial = "" if final else lines.pop()
        return [line for line in lines if line]


class WorkerOutput:
    """Receives and shows the output of all workers of a group, in a thread of its own.

    Args:
        labels: What each worker is called in front of its lines, in rank order.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels, num_workers = labels, len(labels)
        self._streams = [_Stream(rank, name) for rank in range(num_workers) for name in ("stdout", "stderr")]
        self._tails = [deque[str](maxlen=_TAIL_LINES) for _ in range(num_workers)]
        self._selector = selectors.DefaultSelector()
        for stream in self._streams:
            self._selector.register(stream.read_fd, selectors.EVENT_READ, stream)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moreh-output", daemon=True)
        self._thread.start()

    def rename(self, labels: Sequence[str]) -> None:
        """Has workers be called otherwise in front of their lines from now on."""
        self._labels = labels

    def descriptors(self, rank: int) -> tuple[int, int, tuple[int, ...]]:
        """Returns what worker `rank` inherits: descriptors for its stdout and its stderr, and those to close."""
        own = [stream.write_fd for stream in self._streams if stream.rank == rank]
        return own[0], own[1], tuple(stream.write_fd for stream in self._streams if stream.rank != rank)

    def write_ends(self) -> list[int]:
        """Returns the descriptors that take the output of all workers."""
        return [stream.write_fd for stream in self._streams]

    def feed(self, rank: int, name: str, data: bytes) -> None:
        """Takes what a worker on another host has written to "stdout" or "stderr"."""
        stream = next(one for one in self._streams if one.rank == rank and one.name == name)
        while data and stream.write_fd >= 0:
            data = data[os.write(stream.write_fd, data) :]

    def workers_have_inherited(self) -> None:
        """Closes this process's copies of the write ends. Harmless when repeated."""
        for stream in self._streams:
            if stream.write_fd >= 0:
                os.close(stream.write_fd)
                stream.write_fd = -1

    def tail(self, rank: int) -> str:
        """Returns the last lines that worker `rank` printed, for an error message."""
        return "\n".join(self._tails[rank])

    def close(self) -> None:
        """Shows what has been printed so far and ends. Called after the workers are gone."""
        self.workers_have_inherited()
        self._ending.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._ending.is_set() and self._selector.get_map():
            self._read_once(timeout_s=0.1)
            self._show_differing(time.monotonic() - HOLD_S)
        while self._selector.get_map() and self._read_once(timeout_s=0.0):
            pass
        for stream in self._streams:
            self._take(stream, b"", final=True)
        self._show_differing(float("inf"))
        for key in list(self._selector.get_map().values()):
            self._drop(key.data)
        self._selector.close()

    def _read_once(self, timeout_s: float) -> bool:
        """Reads what there is; returns whether there was anything."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            try:
                data = os.read(key.fd, 65536)
            except BlockingIOError:
                continue
            if data:
                self._take(key.data, data, final=False)
            else:
                self._drop(key.data)
        return bool(ready)

    def _drop(self, stream: _Stream) -> None:
        self._selector.unregister(stream.read_fd)
        os.close(stream.read_fd)

    def _take(self, stream: _Stream, data: bytes, final: bool) -> None:
        text = stream.decode(data, final)
        if stream.rank == 0 and text:
            _show(stream.name, text)
        lines = stream.take_lines(text, final)
        self._tails[stream.rank].extend(lines)
        now_s = time.monotonic()
        for line in lines:
            if stream.rank != 0:
                stream.comparison.printed(line, now_s)
                continue
            for other in self._streams:
                if other.rank != 0 and other.name == stream.name:
                    other.comparison.first_worker_printed(line)

    def _show_differing(self, before_s: float) -> None:
        for stream in self._streams:
            lines = stream.comparison.differing(before_s)
            if lines:
                _show(stream.name, "".join(f"[{self._labels[stream.rank]}] {line}\n" for line in lines))


def _show(name: str, text: str) -> None:
    target = getattr(sys, name)
    if target is None:
        return
    try:
        target.write(text)
        target.flush()
    except (OSError, ValueError):
        return  # the script closed its own output, so this cannot be shown
