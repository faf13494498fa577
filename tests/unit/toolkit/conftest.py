"""A cache folder of each test's own, and a machine with two cores."""

from __future__ import annotations

import pytest

from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.toolkit import device_command, switch_model
from moreh_ap.toolkit.machine_inventory import MachineInventory
from unit.toolkit.samples import TWO_CORES


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def cpu_machine(monkeypatch):
    monkeypatch.setattr(switch_model, "look", lambda: MachineInventory(TWO_CORES))
    monkeypatch.setattr(device_command, "look", lambda: MachineInventory(TWO_CORES))
