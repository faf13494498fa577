"""Workers that are not there: what they answer, and what they refuse."""

from __future__ import annotations

import pytest

from moreh_ap.dry.absent_workers import AbsentWorkers, UnlistedJob
from moreh_ap.errors import UnsupportedError
from moreh_ap.local.jobs import running_jobs
from moreh_ap.protocol.messages.devices import DescribeDevice, DeviceInfo, ReportMemory
from moreh_ap.protocol.messages.state import ReadState
from moreh_ap.protocol.messages.stream import Batch, Synchronize

INFO = DeviceInfo("H100-80GB", 85 * 10**9, True)


def test_each_device_answers_what_scripts_ask_before_a_model_is_called():
    workers = AbsentWorkers(INFO, 3, "cuda")
    answers = workers.answers(workers.submit(Batch((DescribeDevice(), Synchronize(), ReportMemory()))))
    free = {"allocated": 0, "peak": 0, "free": INFO.memory_bytes, "total": INFO.memory_bytes}
    assert answers == [[INFO, None, free]] * 3
    assert workers.pids == []
    workers.drain()
    workers.close()


def test_what_needs_workers_is_refused():
    with pytest.raises(UnsupportedError, match="ReadState needs them"):
        AbsentWorkers(INFO, 1, "cuda").submit(Batch((ReadState(()),)))


def test_other_programs_see_no_job(tmp_path, monkeypatch):
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    job = UnlistedJob()
    job.has_model("Llama", "shard=2")
    assert running_jobs() == []
    job.close()
