"""Which jobs are ended, after asking."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moreh_ap.local.jobs import JobEntry, Process, start_of
from moreh_ap.toolkit import prompts, reset


@pytest.fixture
def job():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    entry = JobEntry("7", Process(process.pid, start_of(process.pid)), "", 1, "CPU.1", "cpu", 1, 1)
    yield entry
    process.kill()
    process.wait()


def listed(monkeypatch, *jobs):
    monkeypatch.setattr(reset, "running_jobs", lambda: list(jobs))


def test_a_process_is_ended_and_a_later_one_with_its_id_is_not(job):
    later = JobEntry("8", Process(job.process.pid, "another start"), "", 1, "CPU.1", "cpu", 1, 1)
    assert reset.end([later], asked_s=0.1) == []
    assert job.is_alive()
    assert reset.end([job], asked_s=5.0) == []
    assert not job.is_alive()


def test_jobs_of_another_accelerator_stay(monkeypatch, capsys, job):
    listed(monkeypatch, job)
    assert reset.run(only=0, yes=True) == 0
    assert capsys.readouterr().out == "There is no job to end.\n" and job.is_alive()


def test_without_agreement_nothing_is_ended(monkeypatch, capsys, job):
    listed(monkeypatch, job)
    monkeypatch.setattr(prompts, "agree", lambda question: False)
    assert reset.run(only=None, yes=False) == 1
    assert "Nothing was ended." in capsys.readouterr().out and job.is_alive()


def test_another_users_job_stays(monkeypatch, capsys, job):
    listed(monkeypatch, job)
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert reset.run(only=None, yes=True) == 0
    assert "Job 7 is another user's and stays." in capsys.readouterr().out and job.is_alive()
