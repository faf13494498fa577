"""Small values of a GPU: who waits for them, and in which order answers leave."""

from __future__ import annotations

import os
import pickle
import threading

import pytest
import torch

from moreh_ap.protocol.encoding import pack, unpack
from moreh_ap.protocol.messages.tensors import LeafReply
from moreh_ap.runtime.relay.worker_answer import DONE, FAILED
from moreh_ap.runtime.worker.actor import WorkerSide, WorkerSpec
from moreh_ap.runtime.worker.answers.answering_thread import AnsweringThread
from moreh_ap.runtime.worker.answers.late_replies import LateReply

_REPLY = LeafReply("rows", (2, 3), torch.float32, True, b"", order=(1, 0))


class _Event:
    """Stands for the event behind a copy: the values come when it is waited for."""

    def __init__(self, host, values):
        self.host, self.values = host, values

    def synchronize(self):
        self.host.copy_(self.values)


def _late(values):
    host = torch.full_like(values, float("nan"))
    return LateReply("rows", (2, 3), torch.float32, True, b"", False, (1, 0), None, host, _Event(host, values))


def test_a_pickled_reply_has_waited_for_its_value_and_is_like_others():
    values = torch.arange(6.0).view(2, 3)
    for found in (pickle.loads(pickle.dumps(_late(values))), unpack(pack([_late(values)]))[0]):
        assert type(found) is LeafReply and torch.equal(found.tensor(), values)
        assert (found.kind, found.differentiable, found.is_operand, found.order) == ("rows", True, False, (1, 0))


def test_the_copy_is_queued_and_nothing_waits(monkeypatch):
    done = []

    class Event:
        def __init__(self, *, blocking):
            assert blocking

        def record(self):
            done.append("recorded")

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, dtype: empty(*shape, dtype=dtype))
    reply = LateReply.of(_REPLY, torch.arange(6.0, dtype=torch.float64).view(3, 2).t())
    assert done == ["recorded"] and reply.host.dtype == torch.float32 and reply.host.is_contiguous()
    assert reply.host.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]] and reply.order == (1, 0)


class _Executor:
    """Executes functions."""

    def __init__(self, rank, world_size, device_type):
        self.device_type = device_type

    def execute(self, command):
        return [os.getpid, _boom, _unpicklable][command]()


def _boom():
    raise ValueError("boom")


def _unpicklable():
    return threading.Lock()


@pytest.fixture
def side(monkeypatch):
    """Makes a GPU's worker side that has joined without others."""
    monkeypatch.setattr("moreh_ap.runtime.worker.actor._join_process_group", lambda spec: None)
    descriptor = os.memfd_create("values")
    side = WorkerSide()
    executor = f"{__name__}:_Executor"
    assert side.join(WorkerSpec(0, 1, "cuda", executor, descriptor, "", 1.0)).status == DONE
    yield side
    os.close(descriptor)


def test_another_thread_answers(side):
    answers, arrived = [], threading.Event()

    def send(answer):
        answers.append((answer, threading.current_thread().name))
        arrived.set()

    side.execute_and_go_on(1, 0, pack(0), send)
    assert arrived.wait(10)
    ((answer, thread),) = answers
    assert answer.status == DONE and unpack(answer.content) == os.getpid() and thread == "moreh-answers"


@pytest.mark.parametrize(("command", "said"), [(1, "boom"), (2, "pickle")])
def test_what_raises_while_an_answer_is_packed_is_answered_too(side, command, said):
    answers, arrived = [], threading.Event()
    side.execute_and_go_on(1, 0, pack(command), lambda answer: (answers.append(answer), arrived.set()))
    assert arrived.wait(10)
    assert answers[0].status == FAILED and said in str(vars(unpack(answers[0].content)))
    assert side.trouble().number == 1


def test_answers_leave_in_order():
    answers, may_go, done = AnsweringThread(), threading.Event(), threading.Event()
    left = []
    answers.put(lambda: (may_go.wait(10), left.append(1)))
    answers.put(lambda: (left.append(2), done.set()))
    assert left == []
    may_go.set()
    assert done.wait(10) and left == [1, 2]


def test_the_end_of_who_takes_answers_is_no_error_of_the_thread_that_sends_them():
    answers, done = AnsweringThread(), threading.Event()

    def send_to_nobody():
        raise BrokenPipeError

    answers.put(send_to_nobody)
    answers.put(done.set)
    assert done.wait(10)
