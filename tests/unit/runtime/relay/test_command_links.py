"""A command is one message to each host and one back, however many workers a host has."""

from __future__ import annotations

import os
import threading
import time

import pytest

from moreh_ap.protocol.encoding import Packed, pack
from moreh_ap.runtime.relay.worker_answer import Answer
from unit.runtime.relay.samples import running

TIMEOUT_S = 20.0


def own(rank, number, command):
    return "done", b"%d of %d: %s" % (rank, number, command[0])


@pytest.mark.parametrize("per_host", [1, 3, 8])
def test_messages_do_not_grow_with_the_workers_of_a_host(tmp_path, per_host):
    with running(tmp_path, 2, per_host) as run:
        run.serve(own)
        for number in range(1, 11):
            command = Packed(b"step") if number % 2 else [Packed(b"own %d" % rank) for rank in range(2 * per_host)]
            answers = run.links.execute(number, 0, command).wait(TIMEOUT_S)
            expected = [
                b"%d of %d: %s" % (rank, number, b"step" if number % 2 else b"own %d" % rank)
                for rank in range(2 * per_host)
            ]
            assert list(answers.values()) == expected
        assert (run.links.num_sent, run.links.num_received) == (22, 20), "one each a host and command, and the first"


def test_many_hosts_hand_on_and_the_controller_talks_to_a_few(tmp_path):
    """Fourteen hosts in a tree of four levels: answers in rank order, values and commands where they belong."""
    with running(tmp_path, 14, 2, most=2) as run:
        memories = run.memories
        run.serve(lambda rank, number, command: (
            "done", b"%d: %s %s" % (rank, command[0], os.pread(memories[rank // 2], 5, 0))
        ))  # fmt: skip
        run.links.keep(None, 1, 0, b"value")
        run.links.keep(9, 2, 0, b"other")
        for number, command in ((1, Packed(b"all")), (2, [Packed(b"own %d" % rank) for rank in range(28)])):
            answers = run.links.execute(number, 0, command).wait(TIMEOUT_S)
            text = [b"all"] * 28 if number == 1 else [b"own %d" % rank for rank in range(28)]
            value = [b"other" if rank // 2 == 9 else b"value" for rank in range(28)]
            assert list(answers.values()) == [b"%d: %s %s" % (rank, text[rank], value[rank]) for rank in range(28)]
        assert run.links.num_received == 4, "two branches, two commands"
        assert run.links.num_sent == 9, "what each branch is told first, two commands each; of values three"


def test_the_end_of_a_host_below_is_told_with_its_index(tmp_path):
    with running(tmp_path, 7, 1, most=2) as run:
        run.serve(own)
        run.links.execute(1, 0, Packed(b"")).wait(TIMEOUT_S)
        run.relays[3]._above._outgoing.shut()
        deadline_s = time.monotonic() + TIMEOUT_S
        while not run.ended and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert run.ended[0] == (3, "")


def test_a_failure_below_is_told_at_once_and_its_answer_once(tmp_path):
    with running(tmp_path, 7, 1, most=2) as run:
        run.serve(lambda rank, *_: ("failed", b"why") if rank == 3 else ("done", None))
        answers = run.links.execute(1, 0, Packed(b"")).wait(TIMEOUT_S)
        assert [answer.status for answer in answers] == ["done"] * 3 + ["failed"] + ["done"] * 3
        assert [trouble.number for trouble in run.links.troubles()] == [1]


def test_equal_answers_of_a_host_travel_once(tmp_path):
    with running(tmp_path, 1, 8) as run:
        run.serve(lambda *_: ("done", b"x" * 100_000))
        pending = run.links.execute(1, 0, Packed(b""))
        assert list(pending.wait(TIMEOUT_S).values()) == [b"x" * 100_000] * 8
        assert sum(map(len, pending._found[0])) < 100_100
        assert pending.wait(0.0) is pending.wait(0.0), "asked again"


def test_commands_are_executed_in_their_order_and_sending_never_waits_for_a_worker(tmp_path):
    go, order = threading.Event(), []

    def answer(rank, number, command):
        go.wait(TIMEOUT_S)
        order.append((rank, number))
        return "done", None

    with running(tmp_path) as run:
        run.serve(answer)
        pending = [run.links.execute(number, 0, Packed(b"x" * 100_000)) for number in range(1, 101)]  # 10 MB a worker
        with pytest.raises(TimeoutError):
            pending[0].wait(0.05)
        go.set()
        for one in pending:
            one.wait(TIMEOUT_S)
        for rank in range(4):
            assert [number for other, number in order if other == rank] == list(range(1, 101))


def test_a_failure_is_told_while_other_workers_hang(tmp_path):
    hang = threading.Event()

    def answer(rank, number, command):
        if rank == 2:
            return "failed", b"why"
        hang.wait(TIMEOUT_S)
        return "done", None

    with running(tmp_path) as run:
        run.serve(answer)
        pending = run.links.execute(7, 3, Packed(b""))
        with pytest.raises(TimeoutError):
            pending.wait(1.0)
        (trouble,) = run.links.troubles()
        assert (trouble.number, trouble.epoch, trouble.answer) == (7, 3, Answer("failed", pack(b"why")))
        hang.set()
        assert [answer.status for answer in pending.wait(TIMEOUT_S)] == ["done", "done", "failed", "done"]


def test_a_connection_that_ends_is_told(tmp_path):
    ended = threading.Event()
    with running(tmp_path) as run:
        run.serve(own)
        run.links.execute(1, 0, Packed(b"")).wait(TIMEOUT_S)
        run.links._on_end = lambda host, why: host == 1 and ended.set()
        run.relays[1]._above._outgoing.shut()
        assert ended.wait(TIMEOUT_S)
