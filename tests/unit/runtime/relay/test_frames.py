"""Frames arrive as they were sent, in their order, and sending one never waits."""

from __future__ import annotations

import io
import socket
import time

from moreh_ap.runtime.relay.frames import COMMAND, Arriving, Frame, Sender, SocketOutgoing, read, written


def test_a_frame_comes_back_and_a_broken_one_is_the_end():
    data = written(COMMAND, 1 << 40, 3, [b"", b"one", b"x" * 70_000])
    assert read(io.BytesIO(data)) == Frame(COMMAND, 1 << 40, 3, [b"", b"one", b"x" * 70_000])
    for length in (0, 5, 16, 20, 45, len(data) - 1):
        assert read(io.BytesIO(data[:length])) is None


def test_sending_never_waits_and_keeps_the_order():
    ours, theirs = socket.socketpair()
    sender = Sender(SocketOutgoing(ours))
    started_s = time.monotonic()
    for number in range(2000):
        sender.send(COMMAND, number, 0, [b"x" * (number % 7) * 1000, b"y" * (1 << 19) if number % 500 == 499 else b""])
    assert time.monotonic() - started_s < 5.0 and sender.num_sent == 2000
    with theirs.makefile("rb") as stream:
        frames = [read(stream) for _ in range(2000)]
    assert [frame.number for frame in frames] == list(range(2000))
    assert [len(frame.parts[0]) for frame in frames] == [number % 7 * 1000 for number in range(2000)]
    sender.send(COMMAND, 2000, 0, [b"after it has caught up"])
    with theirs.makefile("rb") as stream:
        assert read(stream).parts == [b"after it has caught up"]
    ours.close()
    theirs.close()


def test_a_broken_connection_ends_the_thread_and_loses_what_comes_later():
    ours, theirs = socket.socketpair()
    sender = Sender(SocketOutgoing(ours))
    sender.send(COMMAND, 0, 0, [b"x" * (1 << 22)])
    thread = sender._thread
    assert thread is not None and thread.is_alive()
    theirs.close()
    thread.join(10.0)
    assert not thread.is_alive()
    sender.send(COMMAND, 1, 0, [b"lost"])
    ours.close()


def test_a_frame_that_arrives_in_pieces_is_never_waited_for():
    ours, theirs = socket.socketpair()
    arriving = Arriving(ours)
    data = (
        written(COMMAND, 1, 2, [b"one", b"", b"x" * 3000]) + written(COMMAND, 2, 0, []) + written(COMMAND, 3, 0, [b"y"])
    )
    found = []
    for begin in range(0, len(data), 7):
        theirs.send(data[begin : begin + 7])
        taken = arriving.take()
        assert taken is not None
        found += taken
    assert found == [
        Frame(COMMAND, 1, 2, [b"one", b"", b"x" * 3000]),
        Frame(COMMAND, 2, 0, []),
        Frame(COMMAND, 3, 0, [b"y"]),
    ]
    assert arriving.take() == [], "there is nothing"
    theirs.send(data)
    taken = arriving.take()
    assert taken is not None and [frame.number for frame in taken] == [1, 2, 3]
    theirs.send(data[:20])
    assert arriving.take() == []
    theirs.close()
    assert arriving.take() is None
    ours.close()


def test_what_is_no_frame_of_ours_ends_the_connection():
    ours, theirs = socket.socketpair()
    theirs.send(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n")
    assert Arriving(ours).take() is None
    ours.close()
    theirs.close()
