"""Answers are complete once every source has answered, in order; what several say travels once."""

from __future__ import annotations

import random

import pytest

from moreh_ap.runtime.relay.answers import Column, JoinedAnswers, joined, written_layout, written_once


def worker(*parts):
    """What a worker answers with one item."""
    return [written_layout([len(parts)]), *map(written_once, parts)]


def of(count, *columns):
    """What a host answers for several workers."""
    return [written_layout([len(columns)]), *(column.written() for column in columns)]


def said(answers):
    return [[list(column.parts()) for column in item] for item in answers.items()]


def test_answers_are_joined_in_the_order_of_their_sources():
    answers = JoinedAnswers([1, 3, 2])
    assert not answers.take(2, of(2, Column(2, (), block=b"ef"))) and not answers.take(0, worker(b"a"))
    assert answers.take(1, of(3, Column(3, (b"b",))))
    assert said(answers) == [[[b"a", b"b", b"b", b"b", b"e", b"f"]]]


def test_equal_answers_are_one():
    answers = JoinedAnswers([1, 3, 2])
    for source, count in enumerate([1, 3, 2]):
        assert answers.take(source, of(count, Column(count, (b"a",)))) is (source == 2)
    assert answers.parts() == worker(b"a") and said(answers) == [[[b"a"] * 6]]


def test_answers_with_fewer_parts_and_items_have_empty_ones():
    answers = JoinedAnswers([1, 1])
    answers.take(0, [written_layout([2, 1]), *map(written_once, (b"a", b"data", b"c"))])
    answers.take(1, worker(b"b"))
    assert said(answers) == [[[b"a", b"b"], [b"data", b""]], [[b"c", b""]]]


@pytest.mark.parametrize("choices", [1, 2, 5, 1000])
@pytest.mark.parametrize("sizes", [[4], [0, 1, 4, 70_000]], ids=["one length", "several lengths"])
def test_columns_say_what_each_worker_said_after_any_number_of_hosts(choices, sizes):
    rng = random.Random(choices)
    words = [rng.randbytes(rng.choice(sizes)) for _ in range(choices)]
    for count in (1, 2, 3, 8, 64):
        said_by = [rng.choice(words) for _ in range(count)]
        columns = [Column(1, (word,)) for word in said_by]
        while len(columns) > 1:
            at = rng.randrange(len(columns) - 1)
            both = joined(columns[at : at + 2])
            columns[at : at + 2] = [Column.read(both.written(), both.count)]
        assert list(columns[0].parts()) == said_by
        assert len({columns[0].which(rank) for rank in range(count)}) >= len(set(said_by))


def test_what_few_of_many_say_differently_adds_few_bytes():
    large = b"x" * 10_000
    column = joined([Column(1, (large if rank else b"y",)) for rank in range(512)])
    assert len(column.written()) < len(large) + 4 * 512 + 100
    each = joined([Column(1, (rank.to_bytes(4, "little"),)) for rank in range(512)])
    assert len(each.written()) == 1 + 4 * 512
