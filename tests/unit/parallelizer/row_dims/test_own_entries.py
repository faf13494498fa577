"""Arguments that number the entries of a row through the whole batch, for a worker that has some of its rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.row_dims.own_entries import OwnEntries, may_number_entries

ROWS, LENGTH = 4, 5
FEATURES_BLF = torch.randn(ROWS, LENGTH, 3)
OWN_BN = torch.tensor([[0, 4, 2], [5, 5, 9], [12, 10, 14], [19, 15, 16]])
OF_OTHERS_BN = torch.where(OWN_BN == 12, 3, OWN_BN)


def entries_of(numbers, features=FEATURES_BLF):
    (found,) = may_number_entries([features, numbers], ROWS)
    return found


def taken(extension, features, numbers):
    """What ``features.view(-1, size)[numbers]`` is with the numbers that a forward gets."""
    (_, moved), _ = extension.prepared(nn.Identity(), (features, numbers), {})
    return features.reshape(-1, features.shape[-1])[moved.long()]


def test_numbers_of_a_row_s_own_entries_are_found_and_others_are_not():
    assert entries_of(OWN_BN) == ((1, 0),)
    assert list(may_number_entries([FEATURES_BLF, OF_OTHERS_BN], ROWS)) == []
    assert list(may_number_entries([FEATURES_BLF, OWN_BN.float()], ROWS)) == []
    assert list(may_number_entries([FEATURES_BLF, OWN_BN[:, 0]], ROWS)) == []
    assert list(may_number_entries([FEATURES_BLF[:, :4], OWN_BN], ROWS)) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("start", "stop"), [(0, 4), (0, 1), (1, 3), (3, 4), (2, 2)])
def test_a_worker_takes_the_same_entries_from_its_rows(start, stop, dtype):
    numbers = OWN_BN.to(dtype)
    wanted = FEATURES_BLF.reshape(-1, 3)[OWN_BN][start:stop]
    split = OwnEntries(entries_of(numbers)).of_rows(start, stop)
    assert torch.equal(taken(split, FEATURES_BLF[start:stop], numbers), wanted)
    alone = OwnEntries(entries_of(numbers))
    if start < stop:
        assert torch.equal(taken(alone, FEATURES_BLF[start:stop], numbers[start:stop]), wanted)


def test_rows_that_are_not_neighbours_take_their_own_entries():
    chosen = [3, 1]
    found = taken(OwnEntries(entries_of(OWN_BN)), FEATURES_BLF[chosen], OWN_BN[chosen])
    assert torch.equal(found, FEATURES_BLF.reshape(-1, 3)[OWN_BN][chosen])


@pytest.mark.parametrize("numbers", [OF_OTHERS_BN, OWN_BN[:2]])
def test_a_later_batch_whose_rows_name_entries_of_others_is_not_split(numbers):
    with pytest.raises(Diverged, match="entries of other rows"):
        OwnEntries(entries_of(OWN_BN)).of_rows(2, 4).prepared(nn.Identity(), (FEATURES_BLF[2:], numbers), {})
