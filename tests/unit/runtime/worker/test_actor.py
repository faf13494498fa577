"""A worker's commands and answers over its connection, by one device's thread and by two as on a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moreh_ap.protocol.encoding import pack, unpack
from moreh_ap.runtime.relay.worker_answer import DONE, FAILED, SKIPPED
from moreh_ap.runtime.relay.worker_links import WorkerLinks
from moreh_ap.runtime.worker.actor import WorkerSide, WorkerSpec

TIMEOUT_S = 20.0


class Executor:
    """Doubles numbers, and cannot double 13."""

    def __init__(self, rank: int, world_size: int, device_type: str) -> None:
        self.rank = rank

    def execute(self, command: int) -> tuple[int, int]:
        if command == 13:
            raise ValueError("unlucky")
        return self.rank, 2 * command


@pytest.fixture(params=["cpu", "cuda"])
def links(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerLinks]:
    """Connections to two workers, threads of this process, that serve."""
    monkeypatch.setattr("moreh_ap.runtime.worker.actor._join_process_group", lambda spec: None)
    links = WorkerLinks(str(tmp_path / "commands"), 2)
    descriptor, threads = os.memfd_create("values"), []
    for rank in range(2):
        side, executor = WorkerSide(), f"{__name__}:Executor"
        spec = WorkerSpec(rank, 2, request.param, executor, descriptor, "", 1.0, commands_path=links.path, index=rank)
        assert side.join(spec).status == DONE
        threads.append(threading.Thread(target=side.serve, daemon=True))
        threads[-1].start()
    links.let_in()
    yield links
    links.close()
    for thread in threads:  # they end with the connection
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    os.close(descriptor)


def test_answers_of_many_commands(links: WorkerLinks) -> None:
    sent = [links.execute(number, 0, pack(number + 100)) for number in range(1, 51)]
    for number, pending in enumerate(sent, 1):
        found = [unpack(one.content) for one in pending.wait(TIMEOUT_S)]
        assert found == [(0, 2 * (number + 100)), (1, 2 * (number + 100))]


def test_a_failure_is_told_and_later_commands_of_its_epoch_are_skipped(links: WorkerLinks) -> None:
    failed, skipped = links.execute(1, 0, [pack(1), pack(13)]), links.execute(2, 0, pack(2))
    statuses = [one.status for one in failed.wait(TIMEOUT_S)], [one.status for one in skipped.wait(TIMEOUT_S)]
    assert statuses == ([DONE, FAILED], [DONE, SKIPPED])
    (trouble,) = links.troubles()
    assert (trouble.number, trouble.epoch) == (1, 0) and "unlucky" in str(vars(unpack(trouble.answer.content)))
    later = links.execute(3, 1, pack(5)).wait(TIMEOUT_S)
    assert [unpack(one.content) for one in later] == [(0, 10), (1, 10)]
