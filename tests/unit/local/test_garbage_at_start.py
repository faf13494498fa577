"""Objects that are older than the one line are left out of collections only for a while."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from moreh_ap.local import garbage_at_start


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_left_out() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    garbage_at_start.include_older_objects()
    gc.unfreeze()


def test_older_garbage_is_freed_once_all_objects_are_looked_at() -> None:
    gc.disable()
    try:
        older = weakref.ref(Cycle())
        garbage_at_start.leave_out_older_objects()
        younger = weakref.ref(Cycle())
        gc.collect()
        assert older() is not None
        assert younger() is None
        garbage_at_start.include_older_objects()
        gc.collect()
        assert older() is None
    finally:
        gc.enable()


def test_what_a_script_leaves_out_stays_left_out() -> None:
    gc.freeze()
    garbage_at_start.leave_out_older_objects()
    garbage_at_start.include_older_objects()
    assert gc.get_freeze_count() > 0  # how many, changes: objects that are left out still end with their last reference


def test_a_second_line_leaves_nothing_more_out() -> None:
    garbage_at_start.leave_out_older_objects()
    count = gc.get_freeze_count()
    later = [Cycle() for _ in range(1000)]
    garbage_at_start.leave_out_older_objects()
    assert gc.get_freeze_count() <= count
    assert len(later) == 1000
