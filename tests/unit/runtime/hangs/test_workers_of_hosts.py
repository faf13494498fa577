"""What is known of the workers of several hosts by what their agents say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moreh_ap.runtime.hangs import host_sights, workers_of_hosts
from moreh_ap.runtime.hangs.hang_watch import HANG_S, HangWatch
from moreh_ap.runtime.hangs.host_sights import HostSights, tell_stacks
from moreh_ap.runtime.hangs.stack_answers import Said
from moreh_ap.runtime.hangs.worker_sights import Sight
from moreh_ap.runtime.hangs.workers_of_hosts import WorkersOfHosts

START, NUMBER = 2, 9
QUIET, STOPPED = (False, 0.0, 40.0), (False, 40.0, 0.0)


class Host:
    """An agent, with what it says of two workers."""

    def __init__(self, first: int, oldest: int | None, silent: list[int], *sights: tuple[bool, float, float]) -> None:
        workers = [[first + index, *sight] for index, sight in enumerate(sights)]
        self.sights: dict[str, Any] = {"start": START, "oldest": oldest, "silent": silent, "workers": workers}
        self.said: Any = None
        self.says: list[list[Any]] = []
        self.reason: str | None = None

    def send(self, kind: str) -> None:
        assert kind == "stacks"
        self.said = self.says

    def lost(self) -> str | None:
        return self.reason


def both(**of_second: Any) -> list[Host]:
    """Returns two hosts; all workers but worker 2 have answered."""
    second = {"oldest": NUMBER, "silent": [0], "sights": (QUIET, QUIET), **of_second}
    return [Host(0, None, [], QUIET, QUIET), Host(2, second["oldest"], second["silent"], *second["sights"])]


def test_those_are_silent_of_whom_their_host_says_so():
    assert WorkersOfHosts(both(), 2, START).silent(NUMBER, ()) == {2: Sight(*QUIET)}
    hosts = both()
    hosts[0].sights |= {"oldest": NUMBER + 1, "silent": [1]}
    assert WorkersOfHosts(hosts, 2, START).silent(NUMBER, ()) == {2: Sight(*QUIET)}, "it has answered this one"


@pytest.mark.parametrize(
    "changed",
    [
        {"start": START - 1},
        {"oldest": NUMBER - 1},
        {"workers": [[3, *QUIET]]},
    ],
    ids=["of workers before", "from before this command", "its process has just begun"],
)
def test_what_a_host_says_too_late_or_not_at_all_is_not_known(changed):
    hosts = both()
    hosts[1].sights |= changed
    assert WorkersOfHosts(hosts, 2, START).silent(NUMBER, ()) is None
    hosts[1].sights = {}
    assert WorkersOfHosts(hosts, 2, START).silent(NUMBER, ()) is None


def test_while_workers_join_each_other_all_are_silent():
    assert list(WorkersOfHosts(both(oldest=None), 2, START).silent(0, None)) == [0, 1, 2, 3]


def test_all_hosts_are_asked_and_one_that_does_not_answer_says_nothing(monkeypatch):
    monkeypatch.setattr(workers_of_hosts, "_SAY_S", 0.2)
    hosts = both()
    hosts[0].says = [[0, "stack", "recv", True], [1, "other", "", True]]
    hosts[1].says = None
    said = WorkersOfHosts(hosts, 2, START).ask()
    assert said == {0: Said("stack", "recv", True), 1: Said("other", "", True), 2: Said(), 3: Said()}
    hosts[1].reason = "the connection has ended"
    monkeypatch.setattr(workers_of_hosts, "_SAY_S", 1e9)
    assert WorkersOfHosts(hosts, 2, START).ask() == said, "no command waits for it"


@pytest.fixture
def pass_time(monkeypatch):
    """Returns the first hang that a watch finds, looking ten times a second."""
    now_s = [1000.0]
    monkeypatch.setattr("moreh_ap.runtime.hangs.hang_watch.time.monotonic", lambda: now_s[0])

    def look(hosts: list[Host], seconds: float) -> Any:
        watch, until_s = HangWatch(WorkersOfHosts(hosts, 2, START)), now_s[0] + seconds
        while now_s[0] < until_s:
            now_s[0] += 0.1
            hang = watch.look(NUMBER, ())
            if hang is not None:
                return hang
        return None

    return look


def test_a_stopped_worker_of_a_host_hangs_once_its_command_has_been_waited_for_as_long(pass_time):
    hosts = both(sights=(STOPPED, QUIET))
    assert pass_time(hosts, HANG_S) is None, "it may have been stopped before, while no command needed it"
    hang = pass_time(hosts, HANG_S + 5)
    assert hang.rank == 2 and hang.how.startswith("has been stopped by a signal for 3")


def test_a_collective_of_workers_of_a_host_hangs_if_no_other_worker_can_enter_it(pass_time):
    hosts = both()
    hosts[0].says = [[0, "", "", True], [1, "", "", True]]
    hosts[1].says = [[2, "its stack", "all_reduce", True], [3, "", "", True]]
    hang = pass_time(hosts, HANG_S + 5)
    assert hang.rank == 2 and "all_reduce" in hang.how and "worker 3 is through" in hang.how
    assert hang.stacks[2] == "its stack"
    hosts[1].says[0][3] = False
    assert pass_time(hosts, HANG_S + 5) is None, "it compiles"


def test_an_agent_says_what_the_other_side_reads(monkeypatch):
    monkeypatch.setattr(
        host_sights, "ask", lambda pids: {rank: Said(str(pid), "recv", True) for rank, pid in pids.items()}
    )
    told = []
    tell_stacks({4: 70}, lambda kind, **values: told.append((kind, values)))
    assert told == [("stacks", {"said": [[4, "70", "recv", True]]})]
    sights = HostSights(5.0)
    monkeypatch.setattr(sights._clocks, "look", lambda pids: {rank: Sight(*QUIET) for rank in pids})
    said = sights.look({2: 70, 3: 71}, SimpleNamespace(oldest=lambda: (NUMBER, [1])), START)
    hosts = both()
    hosts[1].sights = said
    assert WorkersOfHosts(hosts, 2, START).silent(NUMBER, ()) == {3: Sight(*QUIET)}
