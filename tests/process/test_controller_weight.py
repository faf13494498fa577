"""A step makes as many Python calls in the script's process for many parameters as for few, and for more workers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "controller_weight.py"
LAYERS = (2, 20)  # 21 and 183 parameter tensors
MORE_LAYERS = LAYERS[1] - LAYERS[0]
MAX_CALLS_A_LAYER = 14  # of a cache that a model returns: a key and a value a layer, promised to the script
MAX_CALLS_A_WORKER = 24  # what each worker answers to the messages of a step is decoded by itself


def weights(folder: Path, workers: int, layers: Sequence[int], cache: str) -> list[dict[str, Any]]:
    """What the script reports of models of these sizes, with or without a cache: "yes" or "no"."""
    pytest.importorskip("transformers")
    report = folder / f"{workers}.json"
    command = [sys.executable, str(SCRIPT), "--workers", str(workers), "--layers", *map(str, layers)]
    subprocess.run([*command, "--cache", cache, "--json", str(report)], check=True, timeout=250)
    return json.loads(report.read_text())


def more_calls(first: dict[str, Any], second: dict[str, Any]) -> dict[str, int]:
    """The functions that the second step calls more often, once for each further layer at least; and how much more.

    How often a thread looks for an answer depends on when it arrives: a few calls more show nothing.
    """
    calls = {f"{module}.{name}": number for module, name, number in first["functions"]}
    found = {f"{module}.{name}": number for module, name, number in second["functions"]}
    more = {name: number - calls.get(name, 0) for name, number in found.items()}
    return {name: number for name, number in more.items() if number >= MORE_LAYERS}


def test_calls_do_not_grow_with_parameters(tmp_path: Path) -> None:
    small, large = weights(tmp_path, 2, LAYERS, "no")
    assert (small["parameters"], large["parameters"]) == (21, 183)
    assert more_calls(small, large) == {}
    assert large["calls"] - small["calls"] < MORE_LAYERS


@pytest.mark.rotating
def test_calls_grow_with_what_a_model_returns_and_little_with_workers(tmp_path: Path) -> None:
    small, large = weights(tmp_path, 2, LAYERS, "yes")
    assert more_calls(small, large), "the keys and values are counted"
    assert large["calls"] - small["calls"] <= MAX_CALLS_A_LAYER * MORE_LAYERS
    (alone,) = weights(tmp_path, 1, LAYERS[:1], "yes")
    assert small["calls"] - alone["calls"] <= MAX_CALLS_A_WORKER
