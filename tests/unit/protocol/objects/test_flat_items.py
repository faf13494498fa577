"""Packed sequences and the entries of several tables, and some of them alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from moreh_ap.protocol.objects.batch_items import find_items


@pytest.mark.parametrize("is_sorted", [False, True])
def test_packed_sequences_are_cut_with_what_has_a_row_for_each(is_sorted):
    lengths = [5, 4, 2, 1] if is_sorted else [2, 5, 1, 4]
    sequences = [torch.arange(length) + 10 * number for number, length in enumerate(lengths)]
    packed = pack_sequence(sequences, enforce_sorted=is_sorted)
    items = find_items((packed, torch.arange(4)), {"scale": 4})
    assert items is not None and items.count == 4
    (some, labels), kwargs = items.select([1, 3])
    assert (some.sorted_indices is None) is is_sorted
    assert [one.tolist() for one in unpack_sequence(some)] == [sequences[1].tolist(), sequences[3].tolist()]
    assert labels.tolist() == [1, 3] and kwargs == {"scale": 4}


@pytest.mark.parametrize("is_stacked", [False, True])
def test_tables_are_cut_by_the_offsets_of_each(is_stacked):
    offsets = [torch.tensor([0, 2, 3]), torch.tensor([0, 1, 4])]
    entries, dense = [torch.arange(5), torch.arange(10, 16)], torch.arange(3)[:, None]
    items = find_items((dense, torch.stack(offsets) if is_stacked else offsets, entries), {})
    assert items is not None and items.count == 3
    (rows, begins, words), _ = items.select([0, 2])
    assert rows[:, 0].tolist() == [0, 2] and isinstance(begins, torch.Tensor) is is_stacked
    assert [one.tolist() for one in begins] == [[0, 2], [0, 1]]
    assert [one.tolist() for one in words] == [[0, 1, 3, 4], [10, 14, 15]]


def test_what_only_looks_like_tables_is_a_list():
    items = find_items(([torch.arange(3), torch.arange(4)],), {})
    assert items is not None and items.count == 2
