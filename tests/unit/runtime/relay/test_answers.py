"""Answers are complete once every source has answered, in order, and travel once where all are equal."""

from __future__ import annotations

from moreh_ap.runtime.relay.answers import JoinedAnswers


def test_answers_are_joined_in_the_order_of_their_sources():
    joined = JoinedAnswers([1, 3, 2])
    assert not joined.take(2, [b"e", b"f"]) and not joined.take(0, [b"a"]) and joined.take(1, [b"b"])
    assert joined.parts() == [b"a", b"b", b"b", b"b", b"e", b"f"]


def test_equal_answers_are_one():
    joined = JoinedAnswers([1, 3, 2])
    assert joined.take(0, [b"a"]) is joined.take(1, [b"a"]) is False and joined.take(2, [b"a", b"a"])
    assert joined.parts() == [b"a"]
