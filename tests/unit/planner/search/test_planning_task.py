"""A task with less usable memory."""

from __future__ import annotations

import pytest

from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.search.constraints import Constraints
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import Task
from unit.planner.search.samples import LIKE_ONE_LINE, PROFILE


@pytest.mark.parametrize("settings", [{}, LIKE_ONE_LINE])
def test_less_usable_memory_leaves_leaner_plans(settings):
    task = Task(PROFILE, find_cluster("8xA100"), 64, Constraints(**settings))
    largest = search(task).best.memory.reserved_bytes
    limited = task.with_usable(0.9 * largest)
    assert limited.usable_bytes == pytest.approx(0.9 * largest)
    assert search(limited).best.memory.reserved_bytes <= 0.9 * largest
    assert task.with_usable(2 * task.usable_bytes).usable_bytes == task.usable_bytes, "never more than there is"
