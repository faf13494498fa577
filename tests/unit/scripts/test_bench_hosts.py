"""The bench of many hosts counts what a step sends, receives and calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench_hosts.py"


def test_messages_grow_with_hosts_alone_and_bytes_by_each_worker_s_loss(tmp_path):
    found = tmp_path / "costs.json"
    sizes = ["--hosts", "1", "2", "--per-host", "3", "--steps", "3", "--json", found]
    subprocess.run([sys.executable, SCRIPT, *sizes], check=True, timeout=120, capture_output=True)
    one, two = json.loads(found.read_text())
    assert (one["sent"], one["received"], two["sent"], two["received"]) == (3, 3, 6, 6)
    assert two["received_bytes"] == 2 * one["received_bytes"] and two["sent_bytes"] == 2 * one["sent_bytes"]
    assert one["calls"] < two["calls"] < 2 * one["calls"]
