"""What the hosts of an accelerator are together."""

from __future__ import annotations

import os

import pytest

from moreh_ap.errors import WorkerLostError
from moreh_ap.hosts.host_report import HostReport
from moreh_ap.runtime.host import host_pool
from moreh_ap.runtime.host.host_connection import HostLostError
from moreh_ap.runtime.host.host_joining import Hosts


class Connection:
    """Stands for a host that has joined and has the same files as this one, or not."""

    def __init__(self, name, gpus=(), has=(), machine=""):
        self.host = self.name = name
        self.report = HostReport(gpus=tuple(map(str, range(gpus or 0))), num_cores=8, machine=machine or name)
        self.has, self.asked, self.sent, self.given = has, [], [], {}

    def ask(self, kind, timeout_s, **values):
        self.asked.append(kind)

        class Answer:
            pass

        Answer.values = {"identities": [list(self.has.get(path, ())) for path in values.get("paths", ())],
                         "digest": self.has.get("digest")}  # fmt: skip
        return Answer

    def send_file(self, path, area, name):
        self.sent.append(path)
        return 10


@pytest.fixture
def pool_of(monkeypatch):
    monkeypatch.setattr(host_pool.run_credentials, "of_hosts", lambda hosts, **others: {})

    def make(connections, devices=None):
        monkeypatch.setattr(host_pool, "join", lambda hosts, per_host, address: Hosts(list(connections), []))
        said = []
        return host_pool.HostPool([one.host for one in connections], devices, said.append), said

    return make


def test_every_host_has_as_many_workers_as_the_smallest_and_says_what_is_left(pool_of):
    pool, said = pool_of([Connection("a", gpus=8), Connection("b", gpus=4)])
    assert (pool.device_type, pool.per_host, pool.place_of(5, 8)) == ("cuda", 4, "b:1")
    assert [pool.place_of(rank, 12) for rank in (5, 6, 11)] == ["a:5", "b:0", "b:5"], "more than a host has devices"
    assert said == ["a: 4 of 8 GPUs are used, as many as each host has"]
    pool, said = pool_of([Connection("a", gpus=8), Connection("b", gpus=4)], devices=4)
    assert (pool.per_host, said) == (2, [])
    assert pool_of([Connection("a", gpus=8), Connection("b")])[0].device_type == "cpu"


def test_hosts_that_are_one_machine_share_its_cores(pool_of):
    assert pool_of([Connection("a"), Connection("b")])[0].num_cores == 8
    assert pool_of([Connection("a", machine="m"), Connection("b", machine="m"), Connection("c")])[0].num_cores == 4


def test_names_of_one_machine_are_said_but_not_containers_there(pool_of):
    same = [Connection("a", machine="m"), Connection("a.net", machine="m"), Connection("c")]
    assert pool_of(same)[1] == ["a and a.net are one machine, whose cores and memory their workers share"]
    assert pool_of([Connection("kubernetes:a", machine="m"), Connection("tls://b", machine="m")])[1] == []


def test_only_files_that_a_host_lacks_are_sent(pool_of, tmp_path):
    path = str(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"0123456789")
    here = host_pool.script_files.identity_of(path)
    digest = host_pool.host_files.digest(path)
    for has, sent in (
        ({path: here}, []),  # a shared file system
        ({path: (1, 10, 1), "digest": digest}, []),  # a copy
        ({path: (1, 10, 1), "digest": "other"}, [path]),
        ({path: (1, 11, 1), "digest": digest}, [path]),
        ({}, [path]),
    ):
        connection = Connection("b", has=has)
        pool, said = pool_of([connection])
        pool.will_provide([path])
        pool.provide(connection, [path])
        assert connection.sent == sent
        assert said == [f"sent to b: {path} (10 bytes)" for path in sent]
        assert pool.provided() == [path]


def test_a_file_is_sent_once_to_a_host_unless_it_has_changed(pool_of, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    connection = Connection("b", has={})
    pool, _ = pool_of([connection])
    pool.provide(connection, [str(path)])
    pool.provide(connection, [str(path)])  # of another model, say
    assert connection.sent == [str(path)]
    path.write_bytes(b"9876543210")
    os.utime(path, (1, 1))
    pool.provide(connection, [str(path)])
    assert connection.sent == [str(path)] * 2


def test_a_host_that_is_lost_meanwhile_gets_no_file_and_one_that_cannot_take_it_ends_the_workers(pool_of, tmp_path):
    path = str(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"0123456789")
    lost, full, other = (Connection(name, has={}) for name in "abc")
    pool, _ = pool_of([lost, full, other])
    for one, error in ((lost, HostLostError("its link was cut")), (full, OSError("b: No space left on device"))):
        one.send_file = lambda path, area, name, error=error: (_ for _ in ()).throw(error)
    pool.provide_all([lost, other], [path])
    assert other.sent == [path], "who waits for the lost one says so"
    with pytest.raises(WorkerLostError, match="host b cannot be sent the model's files: b: No space left") as raised:
        pool.provide_all([lost, full, other], [path])
    assert "df -h" in raised.value.fix


def test_what_workers_have_written_is_taken_from_the_host_that_has_it(pool_of):
    one, other = Connection("a"), Connection("b")
    for connection in (one, other):
        connection.files, connection.taken = f"/tmp/moreh-{connection.name}", {}
        connection.take_files = lambda files, into=connection.taken: (
            into.update(files) or [(rank, "") for rank in files]
        )
    written = {0: ("/tmp/moreh-a/written/1-worker0", "/ckpt/0"), 1: ("/tmp/moreh-b/written/1-worker1", "")}
    pool, _ = pool_of([one, other])
    assert pool.take_from_all([one, other], written) == {0: "", 1: ""}
    assert (one.taken, other.taken) == ({0: written[0]}, {1: written[1]})
    with pytest.raises(WorkerLostError, match=r"A host is lost, and what it has saved \(1-worker1\)"):
        pool.take_from_all([one], written)
    other.take_files = lambda files: (_ for _ in ()).throw(HostLostError("its link was cut"))
    with pytest.raises(WorkerLostError, match=r"The host b is lost, and what it has saved: its link was cut\."):
        pool.take_from_all([one, other], written)


def test_hosts_that_join_are_used_by_the_next_worker_group(pool_of):
    one, other = Connection("a"), Connection("b")
    pool, _ = pool_of([one])
    pool.take()
    assert [pool.num_workers_on(count, 8) for count in (1, 2)] == [8, 16], "8 cores each"
    pool.give_back([one, other], [one])
    assert (pool.hosts, pool.names, pool.kept_by) == (["a", "b"], ["a", "b"], [one])
    other.end = lambda: pool.refused.add("ended")
    pool.refuse(["a"])
    assert pool.take().connections == [one] and pool.hosts == ["a"] and pool.refused == {"b", "ended"}
    assert pool_of([one], devices=2)[0].num_workers_on(2, 2) == 2, "as many as were asked for"
    assert [pool.next_start() for _ in range(2)] == [1, 2]
