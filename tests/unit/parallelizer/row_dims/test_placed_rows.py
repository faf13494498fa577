"""Where a result has its rows, found from what rows give apart; arguments that are cut there."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.row_dims.placed_rows import PlacedRows, RowsAlong, find_rows

STEPS_TBF = torch.arange(60).view(3, 4, 5)  # four rows along dim 1


def found(make, each=1):
    common, singles = make(STEPS_TBF), [make(part) for part in STEPS_TBF.split(each, 1)]
    return find_rows(common, singles, each, lambda one: torch.equal(one, common))


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize(
    "make,wanted",
    [
        (lambda x: x, RowsAlong(1, is_certain=False)),
        (lambda x: x.movedim(1, 2), RowsAlong(2, is_certain=False)),
        (lambda x: x.transpose(0, 1).flatten(0, 1), RowsAlong(0)),
        (lambda x: x.flatten(0, 1), RowsAlong(0, in_turn=True)),
        (lambda x: x.flatten(0, 1).unsqueeze(0), RowsAlong(1, in_turn=True)),
        (lambda x: x[0], RowsAlong(0, is_certain=False)),
        (lambda x: x - x[:, :1], None),
        (lambda x: x.sum(1), None),
    ],
)
def test_where_a_result_has_its_rows(make, wanted, each):
    assert found(make, each) == wanted


def test_rows_of_one_entry_each_do_not_tell_how_several_follow_each_other():
    along = found(lambda x: x[:1].flatten(0, 1))
    assert along.rows_in(torch.zeros(6, 5), 6).groups == 1
    with pytest.raises(Diverged):
        along.rows_in(torch.zeros(12, 5), 6)


def test_results_that_are_shared_by_a_kind_of_call_may_have_other_numbers_of_steps():
    assert RowsAlong(0, in_turn=True).rows_in(torch.zeros(12, 5), 6).groups == 2
    with pytest.raises(Diverged):
        RowsAlong(0, in_turn=True).rows_in(torch.zeros(13, 5), 6)


def test_a_worker_takes_its_rows_of_all_arguments_with_their_gradients():
    axis = Axis(1, 2, None)
    words_TB, mask_BT, weight = torch.arange(12).view(3, 4), torch.ones(4, 3), torch.ones(4, requires_grad=True)
    placed = PlacedRows(4, (1, 0, 0, None), ())
    args, kwargs = placed.take((words_TB, mask_BT, weight), {"scale": 2}, axis)
    assert torch.equal(args[0], words_TB[:, 2:]) and args[1].shape == (2, 3) and kwargs == {"scale": 2}
    args[2].sum().backward()
    assert weight.grad.tolist() == [0, 0, 1, 1]
