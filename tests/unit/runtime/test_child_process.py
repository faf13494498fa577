"""How a process ended that another one collects."""

from __future__ import annotations

import pytest

from unit.runtime.samples import ended, tells


@tells
@pytest.mark.parametrize(("how", "code"), [("sleep 0.1; exit 7", 7), ("sleep 0.1; kill -9 $$", -9)])
def test_the_exit_code_of_a_process_that_another_collected(how, code):
    child = ended(how)
    assert child.exit_code() == code
    child.close()
    assert child.exit_code() is None
