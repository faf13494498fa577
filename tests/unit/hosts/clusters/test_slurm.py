"""The hosts of a Slurm job, where there is no Slurm."""

from __future__ import annotations

import subprocess

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.hosts.clusters import slurm
from moreh_ap.hosts.host_list import parse_hosts, public_name


def scontrol(monkeypatch, said, status=0, error=""):
    asked = []

    def run(words, **unused):
        asked.append(words)
        return subprocess.CompletedProcess(words, status, said, error)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_the_hosts_are_those_of_the_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    asked = scontrol(monkeypatch, "node1\nnode2\n")
    assert parse_hosts("slurm") == ("slurm:node1", "slurm:node2")
    assert asked == [["scontrol", "show", "hostnames", "node[1-2]"]]
    assert public_name("slurm:node1") == "node1"


def test_a_host_is_reached_where_slurm_reaches_it(monkeypatch):
    scontrol(monkeypatch, "NodeName=node1 Arch=x86_64\n   NodeAddr=127.0.0.7 NodeHostName=n\n")
    assert slurm.address_of("node1") == "127.0.0.7"
    assert slurm.command("node1", ["python"])[-2:] == ["--nodelist=node1", "python"]


def test_a_process_outside_of_a_job_and_a_slurm_that_does_not_answer(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(OptionError, match="runs in no Slurm job"):
        parse_hosts("slurm")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    scontrol(monkeypatch, "", 1, "Unable to contact slurm controller")
    with pytest.raises(OptionError, match="Unable to contact"):
        parse_hosts("slurm")


def test_options_that_are_given_come_last_and_so_outrank_the_others():
    lines = slurm.batch_script("train", 4, ["python", "a b.py"], ["--output=mine.log"]).splitlines()
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert "--nodes=4" in asked and asked[-1] == "--output=mine.log" and "--output=train-%j.log" in asked
    assert lines[-2:] == ["export MOREH_HOSTS=slurm", "exec python 'a b.py'"]
