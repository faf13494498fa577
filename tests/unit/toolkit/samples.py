"""Machines, their jobs, and answers of a user."""

from __future__ import annotations

import io
import sys

from moreh_ap.accelerator_models import Accelerators, Supply
from moreh_ap.toolkit.job_usage import JobState, Snapshot
from moreh_ap.toolkit.machine_inventory import MachineInventory

TWO_CORES = Supply("cpu", 2, 24 * 2**30)


def answers(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def state(*found: JobState, accelerators=None) -> Snapshot:
    return Snapshot(MachineInventory(TWO_CORES, "A CPU"), accelerators or Accelerators(0, {0: "CPU.2", 1: ""}), found)
