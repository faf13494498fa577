"""How the rows of a batch are shared, and which tensors have them."""

from __future__ import annotations

import doctest

import pytest
import torch

from moreh_ap.protocol import batch
from moreh_ap.protocol.batch import BatchRows


def test_examples_in_docstrings():
    outcome = doctest.testmod(batch)
    assert outcome.attempted > 0 and outcome.failed == 0


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_row_is_one_worker_s_and_no_worker_has_two_more_than_another(world, rows):
    ranges = [batch.row_range(rank, world, rows) for rank in range(world)]
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_a_tensor_with_several_entries_a_row_is_cut_between_rows():
    entries = torch.arange(12)  # three of each of four rows
    assert [batch.local_entries(entries, rank, 3, 4).tolist() for rank in range(3)] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]


def test_a_tensor_with_an_entry_for_several_rows_is_cut_between_groups_of_rows():
    entries = torch.arange(4)  # one for two of eight rows each
    assert [batch.local_entries(entries, rank, 2, 8).tolist() for rank in range(2)] == [[0, 1], [2, 3]]


def test_the_first_tensor_with_dims_tells_the_rows():
    assert batch.num_rows(["text", torch.tensor(3.0), torch.zeros(5, 2), torch.zeros(7)]) == 5
    assert batch.num_rows([torch.tensor(3.0), 4]) is None


def test_only_dense_tensors_of_as_many_rows_are_cut():
    mask, scale, table = torch.arange(4), torch.tensor(2.0), torch.zeros(3, 4)
    sparse = torch.eye(4).to_sparse()
    leaves = [mask, scale, table, sparse, "text", 4]
    cut = batch.slice_rows(leaves, 4, 1, 3)
    assert cut[0].tolist() == [1, 2]
    assert all(after is before for before, after in zip(leaves[1:], cut[1:]))


def test_chosen_rows_come_in_the_order_asked_for_and_lie_in_memory_as_before():
    images = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    ((chosen),) = batch.select_rows([images], 4, [3, 0])
    assert torch.equal(chosen, images[[3, 0]])
    assert chosen.is_contiguous(memory_format=torch.channels_last)


def test_workers_that_do_not_speak_have_no_rows():
    assert BatchRows((3, None, 2)).total == 5


def test_rows_along_the_second_dim_are_those_of_the_first_tensor_that_has_one():
    steps_TBF, padding_BT, state_LBH = torch.zeros(7, 5, 3), torch.zeros(5, 7), torch.zeros(2, 5, 4)
    leaves = [torch.zeros(9), steps_TBF, padding_BT, state_LBH, "text", torch.zeros(3)]
    (dims,) = batch.row_dims_elsewhere(leaves)
    assert dims == [None, 1, 0, 1, None, None]
    assert batch.rows_along(leaves, dims) == 5
    assert batch.rows_along([torch.zeros(7, 5), torch.zeros(7, 4)], [1, 1]) is None
    assert batch.row_dims_elsewhere([torch.zeros(9)]) == []


def test_masks_of_as_many_steps_as_rows_may_be_whole():
    steps_TBF, mask_TT = torch.zeros(5, 5, 3), torch.zeros(5, 5)
    assert batch.row_dims_elsewhere([steps_TBF, mask_TT]) == [[1, 1], [1, None], [0, None]]
    assert batch.row_dims_elsewhere([steps_TBF, mask_TT.unsqueeze(2)]) == [[1, 1], [1, None], [0, None]]


def test_rows_may_be_first_in_the_input_and_second_in_a_state():
    x_BF, state_LBH = torch.zeros(8, 3), torch.zeros(1, 8, 8)
    assert batch.row_dims_elsewhere([x_BF, state_LBH]) == [[1, None], [0, 1]]
    assert batch.row_dims_elsewhere([x_BF, torch.zeros(8)]) == [[1, None]], "all have them along dim 0: not elsewhere"


def test_chosen_rows_along_each_dim_keep_the_order_in_memory():
    first, second = torch.arange(12).view(4, 3), torch.arange(12).view(3, 4).t()
    chosen = batch.select_rows_along([first, second, "text"], [0, 1, None], [0, 2])
    assert chosen[0].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert chosen[1].tolist() == [[0, 8], [1, 9], [2, 10], [3, 11]]
    assert chosen[1].stride() == (1, 4)


def test_what_has_no_rows_is_copied_too():
    counter, weight = torch.zeros(1), torch.ones(3, requires_grad=True)
    chosen = batch.select_rows_along([torch.ones(4, 2), counter, weight], [0, None, None], [1])
    chosen[1].add_(1)
    assert counter.item() == 0
    assert chosen[2].requires_grad and chosen[2].is_leaf and chosen[2] is not weight


def test_tensors_that_may_be_weights_have_no_rows():
    x_BF, labels_B, weight_BF = torch.zeros(8, 4), torch.zeros(8, dtype=torch.long), torch.zeros(8, 4)
    assert batch.row_dims_without_weights([3, x_BF, weight_BF, labels_B]) == [None, 0, None, 0]
    assert batch.row_dims_without_weights([x_BF, labels_B, torch.zeros(4, 8)]) is None, "none is left out"
    assert batch.row_dims_without_weights([3]) is None


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (torch.tensor(2), True),
        (torch.tensor([0.5]), True),
        (torch.tensor([[True]]), True),
        (torch.tensor([3]), False),  # an index
        (torch.zeros(2), True),
        (torch.zeros(17), False),
        (0.5, False),
    ],
)
def test_which_arguments_are_numbers(leaf, expected):
    assert batch.are_numbers(leaf) == expected
