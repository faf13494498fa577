"""A worker says which of its host's workers it is, takes commands and answers them."""

from __future__ import annotations

import socket

from moreh_ap.runtime.relay.command_socket import CommandSocket
from moreh_ap.runtime.relay.frames import ANSWER, COMMAND, FAILURE, HELLO, Frame, read, written


def test_a_worker_introduces_itself_and_answers(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        worker = CommandSocket(str(tmp_path / "socket"), 5)
        agent, _ = listener.accept()
    with agent, agent.makefile("rb") as stream:
        assert read(stream) == Frame(HELLO, 5, 0, [])
        for has_failed, kind in ((False, ANSWER), (True, FAILURE)):
            agent.sendall(written(COMMAND, 9, 2, [b"command"]))
            command = worker.receive()
            assert command.parts == [b"command"]
            worker.answer(command, [b"layout", b"content"], has_failed=has_failed)
            assert read(stream) == Frame(kind, 9, 2, [b"layout", b"content"])
        agent.shutdown(socket.SHUT_RDWR)
        assert worker.receive() is None
    worker._plain.close()
