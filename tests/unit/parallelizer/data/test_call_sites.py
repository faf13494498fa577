"""Places in code."""

from __future__ import annotations

from moreh_ap.parallelizer.data.call_sites import site_of_call


def inner() -> int:
    return site_of_call()


def test_a_place_is_told_by_every_line_that_leads_there():
    in_a_loop = [inner() for _ in range(3)]
    one, other = inner(), inner()
    assert len({*in_a_loop}) == 1 and len({one, other, *in_a_loop}) == 3
