"""The tables of `moreh-smi`."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace

from rich.console import Console

from moreh_ap.accelerator_models import Accelerators, Supply
from moreh_ap.local import jobs
from moreh_ap.toolkit import smi_tables
from moreh_ap.toolkit.job_usage import JobState, Snapshot, WorkerState
from moreh_ap.toolkit.machine_inventory import Gpu, MachineInventory
from unit.toolkit.samples import state

MIB = 2**20


def entry(**changes) -> jobs.JobEntry:
    process = jobs.Process(os.getpid(), jobs.start_of(os.getpid()))
    made = jobs.JobEntry(
        "4711", process, "2026-11-21T10:00:00+00:00", 0, "CPU.2", "cpu", 2, 1, model="Tiny", plan="shard=2"
    )
    return replace(made, **changes)


def worker(rank, used, busy, share=1.0, device="", gpu=None):
    return WorkerState(
        rank, 100 + rank, device or f"process {rank}", "CPU worker", used, 12 * 1024 * MIB, busy, share, gpu
    )


def printed(table, width=160) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
    console.print(table)
    return console.file.getvalue()


def cells(text: str, row: str) -> list[str]:
    """Returns the cells of the first line that holds `row`."""
    line = next(line for line in text.splitlines() if row in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_idle_accelerators_show_dashes():
    text = printed(smi_tables.overview(state()))
    assert cells(text, "* 0") == ["* 0", "MoAI Accelerator", "CPU.2", "-", "-", "-"]
    assert cells(text, "  1 ") == ["1", "MoAI Accelerator", "CPU.2", "-", "-", "-"], "no model chosen: all devices"
    assert "Processes" not in text
    head = [
        cell.strip()
        for cell in next(line for line in text.splitlines() if "Memory Usage" in line).strip("|").split("|")
    ]
    assert head == ["Device", "Name", "Model", "Memory Usage", "Total Memory", "Utilization"]


def test_a_job_is_shown_with_memory_and_utilization():
    job = JobState(entry(), "python [red]train.py", (worker(0, 300 * MIB, 0.5), worker(1, 100 * MIB, 1.0)))
    text = printed(smi_tables.overview(state(job)))
    assert cells(text, "* 0")[3:] == ["400 MiB", "24576 MiB", "75 %"]
    assert cells(text, "4711") == ["0", "4711", str(os.getpid()), "python [red]train.py", "400 MiB"], (
        "no markup is read"
    )
    text = printed(smi_tables.physical(state(job)))
    assert cells(text, "CPU worker") == ["0", "0", "CPU worker", "4711", "100", "300 MiB", "12288 MiB", "50 %"]
    assert cells(text, "shard=2")[:4] == ["4711", "2", "Tiny", "shard=2"]


def test_two_jobs_share_the_machine_and_one_accelerator_is_picked():
    first = JobState(entry(), "a", (worker(0, MIB, 0.9, device="a"), worker(1, MIB, 0.9, device="b")))
    second = JobState(entry(job_id="4712"), "b", (worker(0, MIB, 0.1, device="c"), worker(1, MIB, 0.1, device="d")))
    other = JobState(entry(job_id="4713", accelerator=1), "c", ())
    everything = state(first, second, other)
    text = printed(smi_tables.overview(everything))
    assert cells(text, "* 0")[3:] == ["4 MiB", "24576 MiB", "100 %"], "two cores, not four"
    assert cells(text, "4713")[-1] == "-", "its workers are starting"
    only = printed(smi_tables.overview(everything, 1))
    assert "4713" in only and "4711" not in only and "* 0" not in only
    plain = smi_tables.plain(everything, 0)
    assert [job["job_id"] for job in plain["jobs"]] == ["4711", "4712"]
    assert json.loads(json.dumps(plain))["accelerators"][0]["used_bytes"] == 4 * MIB


def test_gpus_are_counted_once_and_unknown_readings_are_dashes():
    gpus = tuple(Gpu(index, "H100", 80 * 1024 * MIB, 1000 * MIB, 40.0, 55, 300.0) for index in range(2))
    on_first = [worker(0, 1000 * MIB, 0.4, device="gpu 0", gpu=gpus[0]) for _ in range(2)]
    found = tuple(
        JobState(entry(job_id=str(number), device_type="cuda"), "x", (one,)) for number, one in enumerate(on_first)
    )
    snapshot = Snapshot(MachineInventory(Supply("cuda", 2), "A CPU", gpus), Accelerators(0, {0: ""}), found)
    assert cells(printed(smi_tables.overview(snapshot)), "* 0")[2:4] == ["Medium.128GB", "1000 MiB"]
    text = printed(smi_tables.physical(snapshot))
    assert text.count("55 C") == 3 and text.count("300 W") == 3, "two workers on one GPU, and the idle GPU"
    blind = replace(gpus[1], used_bytes=None, utilization=None, temperature=None, power_w=None)
    text = printed(smi_tables.physical(replace(snapshot, machine=replace(snapshot.machine, gpus=(blind,)), jobs=())))
    assert cells(text, "H100") == ["-", "-", "H100", "-", "-", "-", "81920 MiB", "-", "-", "-"]


def test_the_hosts_of_workers_are_shown_where_there_are_several():
    here = worker(0, MIB, 0.5)
    job = JobState(entry(), "a", (here, replace(here, rank=1, device="there", host="node2")))
    text = printed(smi_tables.physical(state(job)))
    assert cells(text, "node2")[:5] == ["0", "1", "node2", "CPU worker", "4711"]
    assert cells(text, "this one")[:3] == ["0", "0", "this one"]
    assert [one["host"] for one in smi_tables.plain(state(job))["jobs"][0]["workers"]] == [None, "node2"]
    assert "Host" not in printed(smi_tables.physical(state(JobState(entry(), "a", (here,)))))


def test_losses_of_workers_are_shown_where_a_job_has_survived_some():
    job = JobState(entry(losses_survived=3), "train.py", (worker(0, MIB, 0.5),))
    text = printed(smi_tables.physical(state(job)))
    assert "Losses Survived" in text
    assert cells(text, "shard=2")[5:] == ["3", "train.py"]
    assert smi_tables.plain(state(job))["jobs"][0]["losses_survived"] == 3
    undisturbed = JobState(entry(), "train.py", (worker(0, MIB, 0.5),))
    assert "Losses" not in printed(smi_tables.physical(state(undisturbed)))
