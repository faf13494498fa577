"""The parameter guide has every published row, and the plans on it are plans for the devices beside them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from moreh_ap.plan import Plan
from moreh_ap.planner.ranking import weigh
from moreh_ap.planner.remedies import FLAVOURS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def guide():
    spec = importlib.util.spec_from_file_location("parameter_guide", ROOT / "scripts" / "parameter_guide.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def rows_of(page, heading):
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_published_row_is_on_the_page(guide):
    rows = rows_of(guide.PAGE.read_text(encoding="utf-8"), "Beside the published guide")
    assert len(rows) == len(guide.PUBLISHED) == 18
    for cells, row in zip(rows, guide.PUBLISHED):
        assert cells[:3] == [row.model, row.flavour, f"{row.batch} x {row.length:,}"]
        assert cells[6] == f"{row.memory_mib:,}" and cells[10] == str(row.minutes)
        assert Plan.parse(cells[3].strip("`")).num_devices == FLAVOURS[row.flavour]


def test_plans_of_the_other_tables_are_for_their_devices(guide):
    page = guide.PAGE.read_text(encoding="utf-8")
    speeds, own = rows_of(page, "Beside the published speeds"), rows_of(page, "Models and accelerators")
    assert len(speeds) == len(guide.SPEEDS)
    assert len(own) == len(guide.MODELS) * len(guide.ACCELERATORS) * len(guide.SHAPES)
    for cells in [*speeds, *own]:
        for plan in (cell.strip("`") for cell in cells if cell.startswith("`")):
            assert Plan.parse(plan).num_devices == int(cells[1].split(" x ")[0])


def test_a_published_plan_is_weighed_as_it_is_written(guide):
    model, devices, batch, plan, _ = guide.SPEEDS[2]
    task = guide.task_for(model, f"{devices}xMI250", batch, 1024)
    candidate = weigh(task, Plan.parse(plan))
    said = candidate.plan.platform_line(batch)
    assert said.startswith("num_stages : 8, num_micro_batches : 64, batch_per_device : 1, No TP")
    assert "recomputation : 2, distribute_param : true" in said
    fullest_mib = candidate.memory.reserved_bytes / 2**20
    assert 0.5 * devices * fullest_mib < guide.sum_mib(task, candidate.plan) <= devices * fullest_mib
