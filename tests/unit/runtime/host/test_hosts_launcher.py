"""Agents of several hosts end workers and let others in, on as many hosts as are left."""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest

from moreh_ap.errors import MeshStartError
from moreh_ap.hosts.credentials import Credentials
from moreh_ap.hosts.host_report import HostReport
from moreh_ap.runtime import engine_variables
from moreh_ap.runtime.child_process import RemoteChild
from moreh_ap.runtime.host import hosts_launcher
from moreh_ap.runtime.host.hosts_launcher import HostsLauncher
from moreh_ap.runtime.host.serving import Serving
from moreh_ap.runtime.launcher import LaunchRequest
from moreh_ap.runtime.recovery.other_devices import NoOthersError


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    """Leaves the environment of this process as it is."""
    monkeypatch.setattr(engine_variables, "add", lambda variables: None)


class Connection:
    """An agent that does at once what it is told."""

    def __init__(self, name: str, num_gpus: int = 0) -> None:
        self.host = self.name = self.address = name
        self.interface = self.files = ""
        self.report = HostReport(gpus=tuple(map(str, range(num_gpus))))
        self.sent: list[tuple[str, dict]] = []
        self.on_again = lambda start: None
        self.reason: str | None = None
        self.link = None
        self.has_ended, self.serves = False, True

    def lost(self) -> str | None:
        return self.reason

    def give_up(self, reason: str) -> None:
        self.reason = reason

    def send(self, kind: str, payload: bytes = b"", **values) -> None:
        self.sent.append((kind, values))
        if kind in ("again", "serve"):
            self.on_again(values["start"])

    def end(self) -> None:
        self.has_ended = True

    end_soon = end


def serving(start: int) -> dict:
    return {
        "address": "",
        "pid_fd": 1,
        "streams": {},
        "store": f"store{start}",
        "warm": "",
        "memory_fd": 2,
        "commands": "",
        "commands_port": start,
        "copies": [[1, 2, "name"]],
    }


def launcher_of(names: str, num_workers: int, device_type: str = "cpu", num_gpus: int = 0) -> HostsLauncher:
    request = LaunchRequest(num_workers, device_type, 4, "", (), 5.0, 1.0, shared_memory_fd=-1)
    connections = [Connection(name, num_gpus) for name in names]
    pool = SimpleNamespace(
        hosts=list(names), names=list(names), said=[], sent=[], next_start=itertools.count(1).__next__
    )
    pool.say, pool.provided = pool.said.append, list
    pool.provide_all = lambda connections, files: pool.sent.append(([one.name for one in connections], list(files)))
    pool.use = lambda hosts: setattr(pool, "names", [one.name for one in hosts])
    pool.num_workers_on = lambda num_hosts, count: count
    made = HostsLauncher(request, lambda: False, pool)
    made._connections = connections
    made._served = {one.host: Serving(**serving(1)) for one in connections}
    made._children = {rank: RemoteChild(10 + rank) for rank in range(num_workers)}
    made._host_links = SimpleNamespace(close=lambda: closed.append(True))
    closed = made.closed = []
    for rank, one in enumerate(connections):
        answer_from(made, one, rank)
    return made


def answer_from(launcher: HostsLauncher, one: Connection, rank: int) -> None:
    """Has an agent answer the launcher."""
    handle = launcher._handler(one)

    def again(start: int) -> None:
        if rank in launcher._children:
            handle(SimpleNamespace(kind="exit", values={"rank": rank, "code": -9}, payload=b""))
        handle(SimpleNamespace(kind="serving", values={"start": start, **serving(start)}, payload=b""))

    one.on_again = again


class Joining:
    """Hosts that wait."""

    def __init__(self, hosts: list[Connection]) -> None:
        self.hosts, self.has_ended = hosts, False

    def waiting(self) -> list[Connection]:
        return list(self.hosts)

    def take(self, hosts: list[Connection]) -> None:
        self.hosts = [one for one in self.hosts if one not in hosts]

    def close(self) -> None:
        self.has_ended = True


@pytest.fixture
def credentials(monkeypatch) -> None:
    """Has every host have some."""
    made = defaultdict(lambda: Credentials("authority", "certificate", "key"))
    monkeypatch.setattr(hosts_launcher.run_credentials, "of_hosts", lambda hosts: made)


def wait_at(launcher: HostsLauncher, name: str) -> Connection:
    """Has one more host wait."""
    one = Connection(name)
    one.serves = False
    answer_from(launcher, one, -1)
    launcher._joining = Joining([one])
    return one


def test_agents_end_workers_and_let_others_in():
    launcher = launcher_of("ab", 2)
    assert launcher.prepare_again() == ""
    assert launcher.closed == [True] and launcher.pids == []
    told = [(kind, values["start"], values["ranks"]) for one in launcher._connections for kind, values in one.sent]
    assert told == [("again", 2, [0]), ("again", 2, [1])]
    assert [one.commands_port for one in launcher._served.values()] == [2, 2]


def test_the_store_of_earlier_workers_is_not_answered():
    launcher = launcher_of("ab", 2)
    one, ask = launcher._connections[0], {"op": "add", "key": "count", "amount": 1, "request": 7}
    launcher._store.ask_from(one, {**ask, "start": 1}, b"")
    assert one.sent.pop() == ("store", {"request": 7, "start": 1, "number": 1})
    assert launcher.prepare_again() == ""
    one.sent.clear()
    launcher._store.ask_from(one, {**ask, "start": 1}, b"")
    launcher._store.ask_from(one, {**ask, "start": 2}, b"")
    assert one.sent == [("store", {"request": 7, "start": 2, "number": 1})]


def test_what_an_agent_said_of_an_earlier_start_does_not_count():
    launcher = launcher_of("ab", 2)
    launcher._served.clear()
    handle = launcher._handler(launcher._connections[0])
    handle(SimpleNamespace(kind="serving", values={"start": 2, **serving(2)}, payload=b""))
    assert launcher._served == {}


def test_the_hosts_that_are_left_have_all_workers():
    launcher = launcher_of("abc", 6)
    lost = launcher._connections[1]
    lost.reason = "the connection has ended"
    assert "The host b is lost, and the workers on it (2, 3): the connection has ended" in str(launcher.find_dead())
    assert launcher.prepare_again() == ""
    asked = [(one.name, one.sent[0][1]["ranks"]) for one in launcher._connections]
    assert asked == [("a", [0, 1, 2]), ("c", [3, 4, 5])] and lost.sent == []
    environment = launcher._connections[1].sent[0][1]["environment"]
    assert environment["LOCAL_WORLD_SIZE"] == "3" and launcher._request.threads_per_worker == 2
    assert launcher._label(2) == "a, worker 2" and launcher.find_dead() is None
    assert launcher.place_of(2) == " on a", "for tracebacks"
    assert launcher._pool.said == ["all 6 workers are on a, c from now on"]
    launcher._handler(lost)(SimpleNamespace(kind="exit", values={"rank": 2, "code": 0}, payload=b""))


@pytest.mark.parametrize(
    "names, num_workers, lost, gpus, why",
    [
        ("ab", 2, "ab", 0, "no host is left"),
        ("abcd", 4, "da", 0, "the hosts that keep the copies of what their workers held are lost, too"),
        ("ab", 4, "b", 4, ""),
    ],
)
def test_hosts_that_cannot_have_all_workers_say_why(names, num_workers, lost, gpus, why):
    launcher = launcher_of(names, num_workers, "cuda" if gpus else "cpu", gpus)
    assert launcher.copied() is None
    for one in launcher._connections:
        one.reason = "gone" if one.name in lost else None
    assert launcher.prepare_again() == why
    assert len(launcher._connections) == len(names) - (0 if why else len(lost))


@pytest.mark.parametrize(
    "names, num_workers, gpus, why, fewer, left",
    [
        ("abc", 3, 0, "3 workers cannot be dealt evenly to 2 hosts.", 2, "ac"),
        ("ab", 4, 2, "A has 2 GPUs, for 4 workers.", 2, "a"),
    ],
)
def test_hosts_that_have_no_room_for_all_workers_are_left_for_fewer(names, num_workers, gpus, why, fewer, left):
    launcher = launcher_of(names, num_workers, "cuda" if gpus else "cpu", gpus)
    launcher.copied()
    launcher._pool.give_back = lambda hosts, kept_by: given.append((hosts, kept_by))
    given, before = [], launcher._connections
    before[1].reason = "gone"
    with pytest.raises(NoOthersError) as raised:
        launcher.prepare_again()
    assert (raised.value.fact, raised.value.num_workers, raised.value.hosts) == (why, fewer, tuple(left))
    launcher.end()
    assert [one.name for one in given[0][0]] == list(left) and given[0][1] == before
    assert [one.has_ended for one in before] == [one.name not in left for one in before]


def test_a_host_that_is_lost_meanwhile_is_left_out_next():
    launcher = launcher_of("ab", 2)

    def lose(start: int) -> None:
        launcher._connections[1].reason = "its link was cut"

    launcher._connections[1].on_again = lose
    with pytest.raises(MeshStartError, match="The host b is lost"):
        launcher.prepare_again()
    assert launcher.prepare_again() == ""
    assert launcher._connections[0].sent[-1][1]["ranks"] == [0, 1]


def test_files_that_workers_find_are_for_those_of_hosts_that_take_over_too():
    launcher, noted = launcher_of("ab", 2), []
    launcher._pool.will_provide, launcher._pool.provided = noted.extend, lambda: noted
    launcher.provide(["weights"])
    launcher._connections[1].reason = "its link was cut"
    assert launcher.prepare_again() == ""
    assert launcher._pool.sent == [(["a", "b"], ["weights"]), (["a"], ["weights"])]


def test_hosts_that_join_get_workers_after_a_copy(credentials):
    launcher = launcher_of("a", 4)
    assert launcher.copied() is None, "none waits"
    one = wait_at(launcher, "b")
    joined = launcher.copied()
    assert joined == ("b joined a: 4 workers on 2 hosts, 4 on 1 before.", 4, ("a", "b"), None)
    assert one.sent == [] and launcher._pool.names == ["a"], "nothing is told before workers are ended"
    assert launcher.prepare_again() == ""
    asked = [(one.name, one.sent[-1][0], one.sent[-1][1]["ranks"]) for one in launcher._connections]
    assert asked == [("a", "again", [0, 1]), ("b", "serve", [2, 3])] and one.serves
    assert launcher._pool.names == ["a", "b"] and launcher._request.threads_per_worker == 8
    assert launcher._pool.said == [], "the line of who takes over says it"
    assert [one.name for one in launcher._kept_by] == ["a"], "until the others hold what the copy has"
    launcher.restored()
    assert launcher._kept_by == launcher._connections
    assert launcher.copied() is None


def test_a_host_that_joins_replaces_one_that_is_lost(credentials):
    launcher = launcher_of("abc", 3)
    launcher.copied()
    launcher._connections[1].reason = "its link was cut"
    wait_at(launcher, "d")
    assert launcher.prepare_again() == ""
    assert [one.name for one in launcher._connections] == ["a", "c", "d"]
    assert launcher._pool.said == ["all 3 workers are on a, c, d from now on"]


def test_a_host_on_which_no_workers_start_is_left_out_again(credentials):
    launcher = launcher_of("a", 2)
    one = wait_at(launcher, "b")
    assert launcher.prepare_again() == "" and launcher._new == [one]
    assert launcher.prepare_again() == "", "after a start that has failed"
    assert launcher._connections[0].sent[-1][1]["ranks"] == [0, 1]
    assert one.reason == "its workers could not be started" and [one.name for one in launcher._connections] == ["a"]


def test_agents_are_left_for_more_workers_on_more_hosts(credentials):
    launcher = launcher_of("a", 2)
    launcher._pool.num_workers_on = lambda num_hosts, count: 2 * num_hosts
    launcher._pool.give_back = lambda hosts, kept_by: left.append((hosts, kept_by))
    left, one, own = [], wait_at(launcher, "b"), launcher._connections[0]
    assert launcher.copied() == ("b joined a: 4 workers on 2 hosts, 2 on 1 before.", 4, ("a", "b"), None)
    launcher.leave_agents(of_joined=True)
    launcher.end()
    assert left == [([own, one], [own])] and not own.has_ended and not one.has_ended
    assert own.sent == [] and launcher._joining.has_ended


def test_agents_are_left_for_another_plan_without_those_that_wait(credentials):
    launcher = launcher_of("ab", 2)
    launcher._pool.give_back = lambda hosts, kept_by: left.append((hosts, kept_by))
    left, one, own = [], wait_at(launcher, "c"), launcher._connections
    launcher.copied()
    launcher.leave_agents()
    launcher.end()
    assert left == [(own, own)] and not any(host.has_ended or host.sent for host in own)
    assert launcher._joining.has_ended and one not in own


def test_agents_that_never_served_cannot_go_on():
    launcher = launcher_of("ab", 2)
    launcher._served.clear()
    assert launcher.prepare_again() == "the agents of its hosts never served"
