"""Tables of `moreh-smi` in narrow terminals: figures stay whole, words give way."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from moreh_ap.toolkit.fitting_table import FittingTable

COMMAND = "python train.py --learning-rate 1e-5 --some-long-argument value"
PLAN = "shard=2,tensor=2,micro_batches=4,precision=bf16"


def lines(table, width) -> list[str]:
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
    console.print(table)
    return console.file.getvalue().splitlines()


@pytest.fixture
def devices():
    table = FittingTable(
        "Device", "Rank", "Name", "Job ID", "PID", "Memory Usage", "Total Memory", "Utilization", title="a machine"
    )
    table.add_row("0", "0", "CPU worker, 1 core", "2371234", "4050607", "1696 MiB", "12076 MiB", "16 %")
    table.add_row("-", "-", "no CPU worker; 2 cores", "-", "-", "-", "-", "-")
    return table


@pytest.fixture
def jobs():
    table = FittingTable("Job ID", "Devices", "Model", "Plan", "Started", "Process")
    table.add_row("2371234", "2", "LlamaForCausalLM", PLAN, "2026-11-21 22:34:47", COMMAND)
    return table


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(devices, jobs, width):
    shown = lines(devices, width)
    assert max(map(len, shown)) <= width
    (row,) = (line for line in shown if "2371234" in line)
    assert "4050607" in row and "1696" in row and "12076 MiB" in row and "16 %" in row
    shown = lines(jobs, width)
    assert max(map(len, shown)) <= width and not any("…" in line for line in shown)
    columns = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown if line.startswith("|")][1:]
    words = ["".join(cells).replace(" ", "") for cells in zip(*columns)]
    expected = ("2371234", "2", "LlamaForCausalLM", PLAN, "2026-11-2122:34:47", COMMAND.replace(" ", ""))
    assert words == list(expected), "every letter is there, in the column's lines"


def test_where_there_is_room_nothing_is_shortened_or_broken(devices, jobs):
    shown = lines(devices, 160)
    assert "| Memory Usage | Total Memory | Utilization |" in shown[2] and len(shown) == 7
    assert len(lines(jobs, 200)) == 5


def test_used_and_total_memory_become_one_column(devices):
    assert "| 1696 / 12076 MiB |" in "\n".join(lines(devices, 80))
