"""What a module puts into dicts and lists of which it was given copies."""

from __future__ import annotations

import torch

from moreh_ap.parallelizer.observation.filled_arguments import FilledArguments
from moreh_ap.parallelizer.observation.torch_calls import map_leaves

X, Y, Z = torch.zeros(2), torch.ones(2), torch.ones(3)


def _called(given, fill):
    copies = map_leaves(lambda leaf: leaf, given)
    filled = FilledArguments(given, copies)
    fill(copies)
    return filled


def test_entries_that_a_module_adds_reach_the_caller():
    features, more = {"ids": X}, [X]
    given = ((features, more), {"mask": Y})

    def fill(copies):
        (inner, listed), _ = copies
        inner["tokens"], inner["all"] = Y, (Y, Z)
        listed.append(Z)

    filled = _called(given, fill)
    assert [id(one) for one in filled.added()] == [id(Y), id(Y), id(Z), id(Z)]
    assert list(features) == ["ids"] and len(more) == 1, "the module was given copies"
    filled.hand_on(lambda leaf: X if leaf is Z else leaf)
    assert features["tokens"] is Y and features["all"][1] is X and more[1] is X


def test_entries_that_a_module_replaces_and_removes():
    features, more = {"ids": X, "labels": Y}, [X, Y, Z]
    copies_of = ((features, more), {})

    def fill(copies):
        (inner, listed), _ = copies
        inner["ids"] = Z
        del inner["labels"], listed[1:]

    _called(copies_of, fill).hand_on(lambda leaf: leaf)
    assert features == {"ids": Z} and more == [X]


def test_what_is_left_alone_adds_nothing():
    filled = _called((({"ids": X}, [Y], 3), {}), lambda copies: None)
    assert filled.added() == []
