"""What the controller takes from a host."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from moreh_ap.hosts.channel import Channel
from moreh_ap.hosts.host_files import WRITTEN, HostFiles, digest
from moreh_ap.protocol.encoding import SentPlace
from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError


class Way:
    """Streams to an agent that only gives files."""

    address = "10.0.0.2"

    def __init__(self, folder: Path) -> None:
        self._ends = socket.socketpair()
        self.reader, self.writer = (self._ends[0].makefile(mode) for mode in ("rb", "wb"))
        self.channel = Channel(*(self._ends[1].makefile(mode) for mode in ("rb", "wb")))
        self.files, self.asked = HostFiles(folder), []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (message := self.channel.receive()) is not None:
            if message.kind == "piece":
                self.asked.append(message.values["start"])
                piece, error = b"", ""
                try:
                    piece = self.files.read_piece(message.values["name"], message.values["start"])
                except OSError as failure:
                    error = str(failure)
                self.channel.send("piece", piece, error=error)
            elif message.kind == "value":
                start, size = message.values["start"], message.values["num_bytes"]
                self.asked.append(start)
                has = message.values["number"] == 7
                self.channel.send("value", b"0123456789"[start : start + size], error="" if has else "no memory")
            elif message.kind == "remove":
                self.files.remove(message.values["name"])

    def last_words(self) -> str:
        return ""

    def close(self) -> None:
        for end in self._ends:
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def way(tmp_path, monkeypatch):
    monkeypatch.setattr("moreh_ap.hosts.host_files.PIECE_BYTES", 4)
    made = Way(tmp_path / "there")
    (tmp_path / "there" / WRITTEN).mkdir(parents=True)
    return made


def test_a_file_is_taken_one_piece_after_the_other_and_is_gone_there(way, tmp_path):
    there, here = tmp_path / "there" / WRITTEN / "1-worker2.safetensors", tmp_path / "here"
    there.write_bytes(b"0123456789")
    connection = HostConnection("node2", way)
    assert connection.take_file(there.name, str(here)) == digest(str(here))
    assert here.read_bytes() == b"0123456789" and way.asked == [0, 4, 8, 10]
    with pytest.raises(OSError, match="No such file"):
        connection.take_file(there.name, str(tmp_path / "again"))
    connection.end()


def test_a_sent_value_is_read_back_piece_by_piece(way):
    connection = HostConnection("node2", way)
    assert connection.read_value(SentPlace(2, 7, 7)) == b"2345678" and way.asked == [2, 6]
    for place, why in ((SentPlace(0, 5, 8), "no memory"), (SentPlace(10, 5, 7), "nothing is there")):
        with pytest.raises(OSError, match=f"node2: {why}"):
            connection.read_value(place)
    connection.end()
    connection.give_up("its link was cut")
    with pytest.raises(OSError, match="node2: "):
        connection.read_value(SentPlace(2, 7, 7))


def test_what_cannot_be_read_there_names_the_host(way, tmp_path):
    connection = HostConnection("node2", way)
    with pytest.raises(OSError, match=r"node2: .*No such file"):
        connection.take_file("1-worker2.safetensors", str(tmp_path / "here"))
    connection.end()


def test_an_agent_that_says_nothing_is_lost_with_a_reason_and_gives_no_late_answer(way):
    connection = HostConnection("node2", way)
    with pytest.raises(HostLostError, match="its agent has said nothing in 0 s: the host is busy, or reads"):
        connection.await_report(0.05)
    assert connection.lost().startswith("its agent has said nothing")
    with pytest.raises(HostLostError, match="its agent has said nothing"):  # not that of the question before
        connection.ask("identities", 5.0, paths=[])
    connection.end()


def test_a_question_that_is_not_answered_in_time_is_the_end_of_the_host(way):
    connection = HostConnection("node2", way)
    with pytest.raises(HostLostError, match="no answer in 0 s") as raised:
        connection.ask("identities", 0.05, paths=[])
    assert raised.value.host == "node2"
    assert connection.lost() == "no answer in 0 s"
    connection.end()
