"""`moreh-smi`: its arguments, short answers, and the loop."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.toolkit import machine_inventory, smi
from moreh_ap.toolkit.machine_inventory import MachineInventory
from unit.toolkit.samples import TWO_CORES, state


@pytest.mark.parametrize(
    "arguments", [["--yes"], ["-l", "--json"], ["-l", "-r"], ["device"], ["device", "--add", "1", "--list"]]
)
def test_arguments_that_do_not_go_together(arguments):
    with pytest.raises(SystemExit, match="2"):
        smi.main(arguments)


def test_short_tools_of_smi(monkeypatch, capsys):
    monkeypatch.setattr(smi, "look", lambda: MachineInventory(TWO_CORES))
    monkeypatch.setattr(machine_inventory, "_may_have_gpus", lambda: False)
    assert smi.main(["-s"]) == 0
    assert f"torch {torch.__version__}" in capsys.readouterr().out
    assert smi.main(["-i", "3"]) == 2
    assert smi.main(["-l", "0.1"]) == 2
    assert "at least 0.5 seconds" in capsys.readouterr().err
    assert smi.main(["--reset"]) == 0
    assert capsys.readouterr().out == "There is no job to end.\n"
    with pytest.raises(SystemExit, match="0"):
        smi.main(["-v"])


def test_the_state_repeats_until_ctrl_c(monkeypatch, capsys):
    looks = iter(range(2))

    def snapshot(sample_s):
        if next(looks, None) is None:
            raise KeyboardInterrupt
        return state()

    monkeypatch.setattr(smi.job_usage, "snapshot", snapshot)
    assert smi.main(["-l", "0.5"]) == 0
    assert capsys.readouterr().out.count("MoAI Accelerator") == 4, "two accelerators, twice"
