"""What is tried between workers, and what is said of workers that start late, answer wrongly or are lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moreh_ap.errors import MorehError
from moreh_ap.toolkit import link_checks
from moreh_ap.toolkit.findings import FAILED, OK, WARNING
from moreh_ap.toolkit.link_worker import Collective, PointToPoint, Received

RIGHT, WRONG = Received(0, 32, "", 0.002), Received(3, 32, "element 1 of 16 is 0, not 5", 0.001)


@pytest.fixture
def check(monkeypatch):
    """Returns what is found with workers that answer as `answer(command)` says."""

    def check(answer, num_devices=2, start=lambda: None):
        meshes = []

        class Mesh:
            def __init__(self, *arguments, **settings):
                start()
                meshes.append(self)
                self.closed = False

            def wait_ready(self, timeout_s):
                pass

            def submit(self, command, recoverable):
                return SimpleNamespace(result=lambda timeout_s: answer(command))

            def close(self):
                self.closed = True

        monkeypatch.setattr(link_checks, "WorkerGroup", Mesh)
        found = list(link_checks.check_links("cpu", num_devices, 1.0))
        assert all(mesh.closed for mesh in meshes)
        return found, len(meshes)

    return check


def test_all_is_well(check):
    found, num_meshes = check(lambda command: [RIGHT, None], num_devices=3)
    assert [(one.name, one.status) for one in found] == [("workers", OK), ("links", OK), ("collectives", OK)]
    assert found[1].found == "6 between pairs of workers, every value right; 1 MiB took 2.0 ms at most"
    assert num_meshes == 1


def test_one_worker_has_no_links(check):
    found, _ = check(lambda command: [RIGHT], num_devices=1)
    assert [one.found for one in found if one.name == "links"] == ["none: one worker has no other"]


def test_workers_that_do_not_start_are_all_that_is_said(check):
    def fail():
        raise MorehError("no port is free\nmore")

    found, _ = check(lambda command: [RIGHT], start=fail)
    assert [(one.name, one.status) for one in found] == [("workers", FAILED)]
    assert "no port is free" in found[0].found and "more" not in found[0].found


def test_a_link_with_wrong_values_is_named(check):
    found, num_meshes = check(lambda command: [None, WRONG if command == PointToPoint(0, 1) else RIGHT])
    (link,) = [one for one in found if one.name == "links"]
    assert link.status == FAILED and num_meshes == 1
    assert link.found.startswith("worker 0 to worker 1: 3 of 32 values wrong on worker 1, for example element 1 of 16")


def test_lost_workers_are_replaced_until_too_many_were(check):
    def answer(command):
        if isinstance(command, Collective):
            return [RIGHT, RIGHT, RIGHT]
        raise TimeoutError if command.sender == 0 else RuntimeError("connection closed\nby peer")

    found, num_meshes = check(answer, num_devices=3)
    assert num_meshes == link_checks.MOST_BROKEN
    assert [one.found for one in found[1:4]] == [
        "worker 0 to worker 1: no answer within 1 s",
        "worker 0 to worker 2: no answer within 1 s",
        "worker 1 to worker 0: RuntimeError: connection closed",
    ]
    untried = [(one.name, one.found) for one in found if one.status == WARNING]
    assert untried == [
        ("links", "3 not tried: workers were lost 3 times before"),
        ("collectives", "3 not tried: workers were lost 3 times before"),
    ]
