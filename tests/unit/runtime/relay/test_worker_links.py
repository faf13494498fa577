"""Commands and answers between the controller and the workers of one machine."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moreh_ap.protocol.encoding import Packed, pack, unpack
from moreh_ap.runtime.engine_error import EngineError
from moreh_ap.runtime.relay import worker_links
from moreh_ap.runtime.relay.command_socket import CommandSocket
from moreh_ap.runtime.relay.frames import ANSWER, Frame, written
from moreh_ap.runtime.relay.worker_answer import DONE, FAILED, SKIPPED, Answer
from moreh_ap.runtime.relay.worker_links import WorkerLinks

NUM_WORKERS = 3
TIMEOUT_S = 20.0


@pytest.fixture
def links(tmp_path: Path) -> Iterator[WorkerLinks]:
    links = WorkerLinks(str(tmp_path / "commands"), NUM_WORKERS)
    yield links
    links.close()


@pytest.fixture
def workers(links: WorkerLinks) -> list[CommandSocket]:
    """Their connections in rank order; they have connected in another one."""
    found = {rank: CommandSocket(links.path, rank) for rank in reversed(range(NUM_WORKERS))}
    links.let_in()
    return [found[rank] for rank in range(NUM_WORKERS)]


def command_of(worker: CommandSocket) -> Frame:
    frame = worker.receive()
    assert frame is not None
    return frame


def answer(worker: CommandSocket, frame: Frame, value: object, status: str = DONE) -> None:
    content = Answer(status, None if status == SKIPPED else pack(value))
    worker.answer(frame, [pickle.dumps(content)], has_failed=status == FAILED)


def values(answers: list[Answer]) -> list[object]:
    return [unpack(one.content) for one in answers]


def test_all_get_one_command_and_answers_are_in_rank_order(links, workers):
    pending = links.execute(4, 2, Packed(b"content"))
    for rank, worker in reversed(list(enumerate(workers))):
        frame = command_of(worker)
        assert (frame.number, frame.epoch, pickle.loads(frame.parts[0])) == (4, 2, (b"content", (), ()))
        answer(worker, frame, rank)
    assert values(pending.wait(TIMEOUT_S)) == [0, 1, 2]
    assert values(pending.wait(0.0)) == [0, 1, 2]


def test_each_gets_its_own(links, workers):
    links.execute(1, 0, [Packed(b"%d" % rank) for rank in range(NUM_WORKERS)])
    assert [pickle.loads(command_of(worker).parts[0])[0] for worker in workers] == [b"0", b"1", b"2"]


def test_answers_of_later_commands_are_kept_while_an_earlier_one_is_waited_for(links, workers):
    first, second = (links.execute(number, 0, Packed(b"")) for number in (1, 2))
    for worker in workers[1:]:
        for number in (1, 2):
            answer(worker, command_of(worker), number)
    with pytest.raises(TimeoutError):
        first.wait(0.05)
    for number in (1, 2):
        answer(workers[0], command_of(workers[0]), number)
    assert values(second.wait(TIMEOUT_S)) == [2, 2, 2]
    assert values(first.wait(0.0)) == [1, 1, 1]


def test_commands_beyond_what_a_connection_holds_do_not_keep_the_script_waiting(links, workers):
    large = os.urandom(1 << 20)
    pending = [links.execute(number, 0, Packed(large)) for number in range(1, 9)]  # nobody reads yet

    def work(worker: CommandSocket) -> None:
        for _ in pending:
            frame = command_of(worker)
            answer(worker, frame, pickle.loads(frame.parts[0])[0])

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for one in pending:
        assert values(one.wait(TIMEOUT_S)) == [large] * NUM_WORKERS
    for thread in threads:
        thread.join()


def test_a_failure_is_known_while_others_have_not_answered(links, workers):
    pending = links.execute(7, 3, Packed(b""))
    answer(workers[1], command_of(workers[1]), "why", FAILED)
    with pytest.raises(TimeoutError):
        pending.wait(0.2)
    ((number, epoch, failed),) = links.troubles()
    assert (number, epoch, failed.status, unpack(failed.content)) == (7, 3, FAILED, "why")
    for worker in (workers[0], workers[2]):
        answer(worker, command_of(worker), None, SKIPPED)
    assert [one.status for one in pending.wait(TIMEOUT_S)] == [SKIPPED, FAILED, SKIPPED]


def test_the_end_of_a_connection_is_no_answer_and_after_a_while_an_error(links, workers, monkeypatch):
    pending = links.execute(1, 0, Packed(b""))
    workers[2]._plain.shutdown(2)
    for worker in workers[:2]:
        answer(worker, command_of(worker), 0)
    with pytest.raises(TimeoutError):
        pending.wait(0.1)
    monkeypatch.setattr(worker_links, "_END_S", 0.0)
    with pytest.raises(EngineError, match="ended its connection"):
        pending.wait(0.1)


def test_a_worker_that_does_not_connect_is_named(links, monkeypatch):
    links._listener.settimeout(0.1)
    connected = CommandSocket(links.path, 1)
    with pytest.raises(EngineError, match=r"workers \[0, 2\] take no commands"):
        links.let_in()
    del connected


def test_waiting_takes_no_longer_than_asked(links, workers):
    pending = links.execute(1, 0, Packed(b""))
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        pending.wait(0.1)
    assert 0.09 < time.monotonic() - began_s < 5.0


def test_a_worker_that_stops_in_the_middle_of_an_answer_keeps_nobody_from_looking_up(links, workers):
    pending = links.execute(1, 0, Packed(b""))
    for worker in workers:
        command_of(worker)
    for rank, worker in enumerate(workers):
        data = written(ANSWER, 1, 0, [pickle.dumps(Answer(DONE, pack(rank)))])
        worker._plain.sendall(data[: len(data) // (2 if rank == 1 else 1)])
    with pytest.raises(TimeoutError):
        pending.wait(0.1)
    assert list(links.answered(1)) == [True, False, True]
    workers[1]._plain.sendall(data[len(data) // 2 :])
    assert pending.wait(TIMEOUT_S)[1] is not None


def test_only_the_first_that_has_not_answered_wakes_who_waits(links, workers):
    pending = links.execute(1, 0, Packed(b""))
    slept = []
    for rank, connection in links._alone.items():
        links._alone[rank] = Counted(connection, rank, slept)
    frames = [command_of(worker) for worker in workers]
    waiting = threading.Thread(target=pending.wait, args=(TIMEOUT_S,))
    waiting.start()
    for rank in (2, 1, 0):
        answer(workers[rank], frames[rank], rank)
    waiting.join()
    assert values(pending.wait(0.0)) == [0, 1, 2]
    assert slept == [0]


class Counted:
    """A poll that notes who is waited for."""

    def __init__(self, poll, rank: int, slept: list[int]) -> None:
        self._poll, self._rank, self._slept = poll, rank, slept

    def poll(self, timeout_ms: float) -> object:
        self._slept.append(self._rank)
        return self._poll.poll(timeout_ms)
