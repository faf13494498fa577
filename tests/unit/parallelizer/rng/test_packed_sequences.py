"""Where the steps of some rows lie among the packed steps of all, against what PyTorch packs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from moreh_ap.parallelizer.rng.draw_recording import DrawRecorder, draws_of
from moreh_ap.parallelizer.rng.packed_sequences import lengths_in, places_of, ranks_of
from moreh_ap.parallelizer.rng.routed_rows import KnownCounts
from moreh_ap.parallelizer.rng.shared_draws import Share, SharedDraws, UnsharedDraw

LENGTHS = torch.tensor([3, 5, 3, 1, 4, 5])
ALL_STEPS = pack_padded_sequence(
    torch.arange(30).view(6, 5), LENGTHS, batch_first=True, enforce_sorted=False
)  # each step is named by row and time


@pytest.mark.parametrize("start,stop", [(0, 2), (2, 4), (4, 6), (1, 6)])
def test_the_steps_of_some_rows_lie_where_pytorch_packs_them(start, stop):
    own = pack_padded_sequence(
        torch.arange(30).view(6, 5)[start:stop], LENGTHS[start:stop], batch_first=True, enforce_sorted=False
    )
    lengths = lengths_in("gru", (ALL_STEPS.data, ALL_STEPS.batch_sizes))
    assert lengths == sorted(LENGTHS.tolist(), reverse=True)
    place_of_row = LENGTHS.argsort(descending=True, stable=True).argsort()
    ranks = sorted(place_of_row[start:stop].tolist())
    assert torch.equal(ALL_STEPS.data[places_of(ranks, lengths)], own.data)


def test_what_is_no_packed_sequence_has_no_lengths():
    assert lengths_in("gru", (torch.zeros(3, 2, 4), torch.zeros(1, 2, 4))) is None
    assert lengths_in("dropout", (torch.zeros(3), torch.tensor([1, 2]))) is None


def test_rows_of_other_lengths_are_not_found():
    assert ranks_of([5, 3], [5, 5, 3, 3], {0}) == [1, 2]
    assert ranks_of([4], [5, 5, 3, 3], set()) is None
    counts = KnownCounts()
    counts.rank(7, [5, 3], Share(0, 2, 2))
    with pytest.raises(UnsharedDraw, match="depends on other rows"):
        counts.rank(7, [4], Share(0, 1, 2))


def test_rows_get_between_layers_what_they_get_with_all_others(monkeypatch):
    monkeypatch.setattr(
        "moreh_ap.parallelizer.observation.call_sites.FORWARD", __name__
    )  # what leads there is left out
    torch.manual_seed(0)
    layers, batch = nn.LSTM(4, 3, 3, dropout=0.5, batch_first=True), torch.randn(6, 5, 4)

    def forward(rows):
        packed = pack_padded_sequence(batch[rows], LENGTHS[rows], batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(layers(packed)[0], batch_first=True, total_length=5)[0]

    drawn = []
    for number in (1, 2):
        with DrawRecorder() as recorder:
            forward(slice(number))
        drawn.append(recorder.drawn)
    with pytest.raises(UnsharedDraw, match="two rows"):
        draws_of(*drawn)
    draws, counts, state, results = draws_of(*drawn, may_route=True), KnownCounts(), torch.get_rng_state(), []
    assert [draw.rows.are_packed for draw in draws] == [True, True]
    for rows in (slice(0, 6), slice(0, 2), slice(2, 5), slice(5, 6)):
        torch.set_rng_state(state)
        counts.restart()
        with SharedDraws(draws, Share(rows.start, rows.stop, 6), counts):
            results.append(forward(rows))
    torch.set_rng_state(state)
    wanted = forward(slice(6))
    torch.testing.assert_close(results[0], wanted)
    torch.testing.assert_close(torch.cat(results[1:]), wanted)
