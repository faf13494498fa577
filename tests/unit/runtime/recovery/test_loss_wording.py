"""What is said of a loss."""

from __future__ import annotations

from moreh_ap.errors import WorkerLostError
from moreh_ap.runtime.recovery.loss_wording import before_first_copy


def test_a_loss_before_the_first_copy_says_what_would_have_helped():
    lost = WorkerLostError("Worker 1 of 2 died", "", "dmesg", "docs/errors.md")
    lost.__cause__ = KeyError("a")
    said = before_first_copy(lost)
    assert "Allowed: MOREH_RECOVERY=memory, with which others take over" in str(said) and said.fix == "dmesg"
    assert said.__cause__ is lost.__cause__
    assert before_first_copy(WorkerLostError("a host", "another")).allowed == "another"
