"""What workers measured, and what of it a file may say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moreh_ap.session.planning.device_rates import as_entry, rates_of, slowest
from unit.session.planning.samples import rates


def test_the_slowest_worker_counts_for_every_figure():
    assert slowest([rates(), rates(3.0), rates(2.0)]) == rates(3.0)
    mixed = replace(rates(), start_s=5.0)
    assert slowest([mixed, rates(2.0)]) == replace(rates(2.0), start_s=5.0)


def test_rates_survive_the_file():
    assert rates_of(json.loads(json.dumps(as_entry(rates(sizes=(2, 4)))))) == rates(sizes=(2, 4))


def change(name: str, value: object) -> dict:
    return {**json.loads(json.dumps(as_entry(rates()))), name: value}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"products": {"fp32": {"1024x1024": 1e11}}, "memory_bytes_per_s": 1e10},
        change("start_s", 0),
        change("start_s", "1e-5"),
        change("start_s", float("nan")),
        change("update_bytes_per_s", 10**400),
        change("update_bytes_per_s", True),
        change("products", 3),
        change("products", []),
        change("products", [["fp32", 1024, 1024, 1e11]]),
        change("products", [["fp32", 1024, 1024, 1e11, 5]]),
        change("elementwise", []),
        change("elementwise", [[1, 10**7, 2e10]]),
        change("exchanges", [["sum", 2, 1000, -1.0, 1.0]]),
        change("exchanges", [{"kind": "sum"}]),
        change("unknown", 1),
    ],
)
def test_an_entry_by_hand_or_of_another_version_counts_as_none(entry):
    assert rates_of(entry) is None
