"""Arguments whose rows are all alike."""

from __future__ import annotations

import torch

from moreh_ap.parallelizer.row_dims.equal_rows import with_equal_rows


def test_every_entry_is_the_first_one_and_marks_and_what_has_no_rows_stay():
    features, words, numbers = torch.rand(3, 4, 2), torch.tensor([[5, 6], [7, 8]]), torch.rand(3)
    marks, weights = torch.tensor([[1, 0], [1, 1]]), torch.rand(4)
    leaves = [features, words, numbers, marks, weights, "mode"]
    features_, words_, numbers_, *others = with_equal_rows(leaves, [0, 0, 0, 0, None, None])
    assert torch.equal(features_, features[0, 0].expand(3, 4, 2))
    assert torch.equal(words_, torch.full((2, 2), 8)) and torch.equal(numbers_, numbers[:1].expand(3))
    assert all(torch.equal(other, leaf) for other, leaf in zip(others[:2], leaves[3:5], strict=True))
    assert others[2] == "mode"


def test_what_is_not_finite_and_labels_that_do_not_count_decide_nothing():
    bias, labels = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-100, 3], [2, -100]])
    bias_, labels_ = with_equal_rows([bias, labels], [0, 0])
    assert torch.equal(bias_, bias) and torch.equal(labels_, torch.full((2, 2), 3))


def test_rows_may_lie_along_another_dim():
    x_TB = torch.rand(4, 3)
    (found,) = with_equal_rows([x_TB], [1])
    assert torch.equal(found, x_TB[0, 0].expand(4, 3)) and found.is_contiguous()
