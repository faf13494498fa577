"""What a forward is told whose rows took different ways."""

from __future__ import annotations

from moreh_ap.parallelizer.loss.diverged import Diverged


def test_a_forward_that_changes_buffers_is_not_computed_once_more():
    assert "rows decide the way, and it changes buffers" in str(Diverged("rows decide the way").after_changes())
