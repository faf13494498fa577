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
    assert torch.equal(words_, torch.full((2, 2), 5)) and torch.equal(numbers_, numbers[:1].expand(3))
    assert all(other is leaf for other, leaf in zip(others, leaves[3:], strict=True))


def test_rows_may_lie_along_another_dim():
    x_TB = torch.rand(4, 3)
    (found,) = with_equal_rows([x_TB], [1])
    assert torch.equal(found, x_TB[0, 0].expand(4, 3)) and found.is_contiguous()
