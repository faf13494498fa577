"""What runs and what it uses: sums over workers, and the readings of living processes."""

from __future__ import annotations

import os

from moreh_ap.accelerator_models import Accelerators, Supply
from moreh_ap.local.jobs import JobEntry, Process, RemoteWorker, start_of
from moreh_ap.toolkit.job_usage import JobState, Snapshot, WorkerState, _workers, command_of, snapshot, used_bytes
from moreh_ap.toolkit.machine_inventory import Gpu, MachineInventory

GIB = 2**30
MACHINE = MachineInventory(Supply("cpu", 4, 16 * GIB))


def worker(rank, device="", used=GIB, busy=0.5, share=1.0):
    return WorkerState(rank, rank, device or f"process {rank}", "a worker", used, 8 * GIB, busy, share)


def state(*workers):
    this = Process(os.getpid(), start_of(os.getpid()))
    entry = JobEntry("1", this, "2026-01-01T00:00:00", 0, "CPU.2", "cpu", 2, 1)
    return Snapshot(MACHINE, Accelerators(0, {0: ""}), (JobState(entry, "train.py", workers),))


def test_a_device_that_two_workers_share_counts_once():
    assert used_bytes([worker(0, "gpu 0"), worker(1, "gpu 0", used=3 * GIB), worker(2)]) == 4 * GIB
    assert used_bytes([]) is None and used_bytes([worker(0, used=None)]) is None


def test_memory_is_never_more_than_the_machine_has():
    assert state().total_bytes([worker(0)]) == 8 * GIB
    assert state().total_bytes([worker(0), worker(1), worker(2)]) == 16 * GIB


def test_utilization_is_of_what_workers_may_use():
    assert worker(0, busy=3.0, share=2.0).utilization == 100.0
    assert worker(0, busy=None).utilization is None
    both = [worker(0, busy=0.5), worker(1, busy=1.0)]
    assert state(*both).utilization(both) == 75.0
    assert state().utilization([]) is None
    assert state().utilization([*both, worker(2, busy=None)]) is None


def test_workers_of_one_accelerator():
    found = state(worker(0), worker(1))
    assert [one.rank for one in found.workers_on(0)] == [0, 1] and found.workers_on(1) == []


def test_a_process_that_is_gone_has_no_command():
    entry = state().jobs[0].entry
    assert "pytest" in command_of(entry) or "python" in command_of(entry)
    gone = JobEntry("1", Process(entry.process.pid, "another start"), "", 0, "", "cpu", 1, 1)
    assert command_of(gone) == "(ended; its workers are left)"


def test_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert snapshot().jobs == ()


def test_a_worker_s_gpu_is_the_one_that_its_job_was_given():
    this = Process(os.getpid(), start_of(os.getpid()))
    names = (("4", "GPU-aa11"), ("6", "GPU-bb22"))
    gpus = tuple(Gpu(index, "H200", 2**37, names=names[index]) for index in range(2))
    machine = MachineInventory(Supply("cuda", 2, 16 * GIB), gpus=gpus)

    def devices(*ids):
        entry = JobEntry("1", this, "", 0, "", "cuda", 2, 1, workers=(this, this), device_ids=ids)
        return [worker.device for worker in _workers(entry, machine, {})]

    assert devices("6", "4") == ["gpu 1", "gpu 0"]
    assert devices("GPU-bb", "GPU-aa11") == ["gpu 1", "gpu 0"]
    assert devices("6", "5") == ["gpu 1", f"process {os.getpid()}"], "another user's setting hides that GPU here"


def test_workers_of_other_hosts_count_with_what_their_hosts_have():
    this = Process(os.getpid(), start_of(os.getpid()))
    remote = tuple(RemoteWorker(rank, f"node{rank // 4}", 100, GIB, 8 * GIB, 0.5, 1.0) for rank in range(8))
    entry = JobEntry("1", this, "", 0, "", "cpu", 8, 1, remote_workers=remote)
    found = _workers(entry, MACHINE, {})
    assert [(one.rank, one.host) for one in found] == [(rank, f"node{rank // 4}") for rank in range(8)]
    assert used_bytes(found) == 2 * GIB, "of one process number on each of two hosts"
    assert state().total_bytes(found) == 64 * GIB, "more than this machine has"
    assert state().utilization(found) == 50.0
    gpu = RemoteWorker(0, "node0", 100, None, 0, None, 1.0)
    (found,) = _workers(JobEntry("1", this, "", 0, "", "cuda", 1, 1, remote_workers=(gpu,)), MACHINE, {})
    assert (found.name, found.used_bytes, found.utilization) == ("GPU", None, None)
