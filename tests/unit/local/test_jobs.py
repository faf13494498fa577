"""The registry of jobs: listed while a process holds devices, and never after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from moreh_ap.local import jobs
from moreh_ap.local.cache_files import FOLDER_VARIABLE


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def test_a_job_is_listed_until_it_closes():
    job = jobs.Job(1, "CPU.4", "cpu", 4, 1)
    job.has_workers([os.getpid(), os.getppid()])
    job.has_model("Tiny", "shard=4")
    (found,) = jobs.running_jobs()
    assert (found.job_id, found.accelerator, found.accelerator_model, found.devices) == (
        str(os.getpid()),
        1,
        "CPU.4",
        4,
    )
    assert [one.pid for one in found.workers] == [os.getpid(), os.getppid()] and found.workers[1].is_alive()
    assert (found.model, found.plan) == ("Tiny", "shard=4")
    job.close()
    job.has_model("Late", "")
    job.close()
    assert jobs.running_jobs() == [] and not list(jobs.folder().iterdir())


def test_a_forked_child_leaves_its_parents_entry():
    job = jobs.Job(0, "", "cpu", 1, 1)
    child = os.fork()
    if child == 0:
        job.has_model("Child", "")
        job.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert [found.model for found in jobs.running_jobs()] == [""]
    job.close()


@pytest.mark.parametrize("damage", ["ended", "another process", "another boot", "broken", "of an older version"])
def test_entries_of_what_does_not_run_are_ignored_and_deleted(damage):
    job = jobs.Job(0, "", "cpu", 1, 1)
    (path,) = jobs.folder().iterdir()
    values = json.loads(path.read_text())
    if damage == "ended":
        done = subprocess.Popen([sys.executable, "-c", ""])
        values["process"] = {"pid": done.pid, "started": jobs.start_of(done.pid)}
        done.wait()
    elif damage == "another process":
        values["process"]["started"] += "0"
    elif damage == "another boot":
        values["process"]["started"] = "0" + values["process"]["started"][1:] + "x"
    elif damage == "of an older version":
        del values["devices"]
    path.write_text("{" if damage == "broken" else json.dumps(values))
    assert jobs.running_jobs() == []
    assert not path.exists()
    job.close()


def test_a_process_that_nobody_waits_for_counts_as_ended():
    done = subprocess.Popen([sys.executable, "-c", "print()"], stdout=subprocess.PIPE)
    process = jobs.Process(done.pid, jobs.start_of(done.pid))
    assert done.stdout.read() == b"\n" and process.started
    os.waitid(os.P_PID, done.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_alive(), "a zombie holds nothing"
    done.wait()


def test_a_job_runs_where_nothing_can_be_written(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(cache / "file"))
    job = jobs.Job(0, "", "cpu", 1, 1)
    job.has_model("Tiny", "")
    assert jobs.running_jobs() == []
    job.close()


def test_a_job_that_takes_other_devices_says_so():
    job = jobs.Job(0, "", "cuda", 2, 4, ("0", "1"))
    job.has_workers([os.getpid()])
    job.has_devices(1, 8, ("0",))
    (found,) = jobs.running_jobs()
    assert (found.devices, found.threads_per_worker, found.device_ids, found.workers) == (1, 8, ("0",), ())
    job.close()


def test_a_job_says_how_often_others_took_over():
    job = jobs.Job(0, "", "cpu", 1, 1)
    job.has_workers([1])
    for _ in range(2):
        job.others_took_over([os.getpid()])
    (found,) = jobs.running_jobs()
    assert (found.losses_survived, [one.pid for one in found.workers]) == (2, [os.getpid()])
    job.close()


def test_workers_on_other_hosts_are_read_as_they_were_told_and_gone_with_new_workers():
    job = jobs.Job(0, "", "cpu", 2, 1)
    told = [jobs.RemoteWorker(rank, f"node{rank}", 100, 2**30, 2**33, None, 1.0) for rank in range(2)]
    job.has_remote_workers(told)
    assert jobs.running_jobs()[0].remote_workers == tuple(told)
    job.has_devices(1, 1, ())
    assert jobs.running_jobs()[0].remote_workers == ()
    job.close()
