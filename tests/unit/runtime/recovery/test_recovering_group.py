"""What others are sent of commands that those before them have not answered."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from threading import Semaphore
from types import SimpleNamespace

import pytest
import torch

from moreh_ap.errors import WorkerLostError
from moreh_ap.protocol.encoding import OUT_OF_BAND_MIN_BYTES, Packed, SentPlace
from moreh_ap.protocol.messages.tensors import TensorData
from moreh_ap.runtime.future import Reply, SentCommand
from moreh_ap.runtime.recovery import recovering_group
from moreh_ap.runtime.recovery.other_devices import DevicesJoinedError, Joined
from moreh_ap.runtime.recovery.recovering_group import RecoveringWorkerGroup
from moreh_ap.runtime.shared_memory import SharedMemory

LARGE = TensorData.of(torch.ones(OUT_OF_BAND_MIN_BYTES))


@pytest.fixture
def group():
    """A group without workers, whose values go to two hosts with one each."""
    made = RecoveringWorkerGroup.__new__(RecoveringWorkerGroup)
    made.shared_memory, made.carried = SharedMemory(is_shared=False), []
    connect(made)
    yield made
    made.shared_memory.close()


def connect(group):
    group.shared_memory.carry_by(lambda host, number, start, value: group.carried.append((host, start)), 1, bytes)


def sent(payload, origin) -> SentCommand:
    return SentCommand(Reply(), 1, 0, False, payload, origin)


def test_large_values_are_sent_once_more_to_the_same_place(group):
    command = sent(group._packed([LARGE]), [LARGE])
    assert group._packed_for_these(command) is command
    connect(group)
    again = group._packed_for_these(command)
    (before,), (after,) = command.payload.buffers, again.payload.buffers
    assert isinstance(after, SentPlace) and after.number > before.number
    assert group.carried == [(None, before.start)] * 2
    assert pickle.loads(again.payload.pickle, buffers=[b"\0" * before.num_bytes])[0].shape == LARGE.shape


def test_each_worker_s_own_value_goes_to_its_host(group):
    each = [group._packed(LARGE, rank) for rank in range(2)]
    connect(group)
    again = group._packed_for_these(sent(each, [LARGE, LARGE]))
    assert [host for host, _ in group.carried] == [0, 1, 0, 1]
    assert not any(group.shared_memory.is_gone(one.buffers) for one in again.payload)


def test_what_is_not_kept_is_said_to_be_lost(group):
    small, large = sent(Packed(b""), None), sent(group._packed(LARGE), None)
    connect(group)
    assert group._packed_for_these(small) is small
    with pytest.raises(WorkerLostError, match="before the first model"):
        group._packed_for_these(large)


@pytest.mark.parametrize(
    "why_not, has_copy, keeper, reason",
    [
        ("", True, "hosts", ""),
        ("no host is left", True, "hosts", "no host is left"),
        ("no host is left", False, "hosts", ""),
        ("the agent has ended", True, "this process", ""),
    ],
)
def test_agents_take_their_copies_with_them(group, why_not, has_copy, keeper, reason):
    group._copies, group._request, ended = object(), None, []
    copies = group._copies if keeper == "this process" else object()
    group._log = SimpleNamespace(has_copy=has_copy)
    group._launcher = SimpleNamespace(prepare_again=lambda: why_not, copies=copies, end=lambda: ended.append(True))
    group._make_launcher = lambda request, is_stopping: "another"
    assert group._prepare_others() == reason
    assert bool(ended) == (group._launcher == "another") == bool(why_not and not reason)


class Copying:
    """A log for which the next answer completes a copy of what workers hold."""

    num_copies, is_open, is_complete, bound = 0, True, True, ""

    def answered(self, command, values, error):
        self.num_copies += 1

    def answered_commands(self):
        return []


@pytest.mark.parametrize(
    "num_workers, bound, ends", [(2, "", True), (2, "views", True), (4, "", True), (4, "views", False)]
)
def test_after_a_copy_workers_end_where_devices_have_joined(group, num_workers, bound, ends):
    group._log, group.num_workers, group._slots = Copying(), 2, Semaphore(0)
    group._log.bound, joined = bound, Joined("b joined a.", num_workers, ("a", "b"))
    group._log.rules = SimpleNamespace(say=(said := []).append)
    group._launcher = SimpleNamespace(copied=lambda: joined)
    command = sent(group._packed(1), 1)
    if ends:
        with pytest.raises(DevicesJoinedError, match=r"^b joined a\.") as raised:
            group._complete(command, [1, 1], None)
        assert (raised.value.num_workers, raised.value.hosts) == (num_workers, ("a", "b"))
    else:
        group._complete(command, [1, 1], None)
        group._look_for_joined()
    assert said == ([] if ends else ["b joined a. Not yet: views"])
    assert Future.result(command.reply) == [1, 1], "the script has its answer before"


def test_more_workers_are_for_the_session_to_start(group):
    group.num_workers, left = 2, []
    group._launcher = SimpleNamespace(leave_agents=lambda of_joined: left.append(of_joined))
    joined = DevicesJoinedError(Joined("b joined a.", 4, ("a", "b")))
    with pytest.raises(DevicesJoinedError) as raised:
        group._replace(joined)
    assert raised.value is joined and left == [True]


@pytest.mark.parametrize("is_complete, may_be_others", [(True, True), (True, False), (False, True)])
def test_agents_are_left_when_others_may_take_over(group, is_complete, may_be_others, monkeypatch):
    monkeypatch.setattr(recovering_group, "_DEAD_WITHIN_S", 0.0)
    error, left, asked = MemoryError(), [], []
    group._launcher = SimpleNamespace(find_dead=lambda: None, leave_agents=lambda: left.append(True))
    rules = SimpleNamespace(may_be_others=lambda one: asked.append(one) or may_be_others)
    group._log = SimpleNamespace(is_complete=is_complete, rules=rules)
    group._prepare_to_stop(error)
    assert bool(left) == (is_complete and may_be_others) and asked == [error] * is_complete
