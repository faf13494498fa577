"""The memory that processes may use: the machine's, or a container's limit."""

from __future__ import annotations

import psutil
import pytest

from moreh_ap.local import memory_limit

TOTAL = int(psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("text", "limit"), [("max\n", TOTAL), ("1048576\n", 2**20), (f"{2 * TOTAL}\n", TOTAL), ("", TOTAL), (None, TOTAL)]
)
def test_the_smaller_of_machine_and_container_counts(tmp_path, monkeypatch, text, limit):
    path = tmp_path / "memory.max"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(memory_limit, "_CGROUP_LIMIT", path)
    assert memory_limit.memory_limit() == limit
