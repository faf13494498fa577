"""Lists with an entry for each row: which travel as tensors, and how a forward gets them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moreh_ap.protocol.objects.listed_rows import LISTED_ROWS, put_back, set_apart


@pytest.mark.parametrize(
    "entries",
    [
        [5, 3, 9],
        (2, 2, 2),
        [True, False, True],
        [0.5, float("inf"), -1.0],
        ["a", "", "longer than the others"],
        [[1, 2], [], [3]],
        [{"text": "a", "length": np.int64(3)}, {}, {"text": None}],
        [np.zeros(2), np.ones(1), np.zeros(0)],
    ],
    ids=str,
)
def test_entries_are_cut_with_the_rows(entries: Any):
    given = (torch.rand(3, 4), {"entries": entries, "size": (2, 2)}), {"mode": "sum"}
    found = set_apart(*given)
    assert found is not None
    args, kwargs = found
    assert args[1]["size"] == (2, 2) and list(kwargs[LISTED_ROWS]) == [f"{type(entries).__name__} 0"]
    kwargs = {**kwargs, LISTED_ROWS: {place: rows[1:] for place, rows in kwargs[LISTED_ROWS].items()}}
    (_, batch), others = put_back(args, kwargs)
    assert type(batch["entries"]) is type(entries) and str(batch["entries"]) == str(entries[1:])
    assert batch["size"] == (2, 2) and others == {"mode": "sum"}


def test_arrays_and_texts_without_a_tensor_count_the_rows_themselves():
    array, texts = np.arange(6.0).reshape(3, 2), ["a", "b", "c"]
    found = set_apart((array,), {"texts": texts, "pair": [1, 2]})
    assert found is not None
    args, kwargs = put_back(*found)
    assert isinstance(args[0], np.ndarray) and (args[0] == array).all() and args[0] is not array
    assert kwargs == {"texts": texts, "pair": [1, 2]}


def test_calls_of_one_kind_differ_in_tensors_alone():
    first, second = (set_apart((torch.rand(2, 4), texts), {}) for texts in (["a", "b"], ["c", "dddd"]))
    assert first is not None and second is not None
    assert first[0][1] == second[0][1], "what takes the list's place"
    assert first[1][LISTED_ROWS]["list 0"].shape == second[1][LISTED_ROWS]["list 0"].shape


@pytest.mark.parametrize(
    "other",
    [[1, 2], [torch.zeros(1)] * 3, [1], [object()] * 3, np.array(["a", "b", "c"]), "abc", {1: 2}],
    ids=["another length", "tensors", "one", "objects", "array of texts", "text", "dict"],
)
def test_other_arguments_stay_as_they_are(other: Any):
    assert set_apart((torch.rand(3, 4), other), {}) is None
