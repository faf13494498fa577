"""What is noted of a forward at the places where items may meet, and with which numbers it goes on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moreh_ap.parallelizer.items.item_recorder import ItemRecorder, Noted, Total
from moreh_ap.parallelizer.items.item_reduction import LARGEST, OWN, SUM

CPU = torch.device("cpu")


def noted(recorder: ItemRecorder) -> list[Noted]:
    return list(recorder.places.values())


def test_numbers_of_every_kind_are_noted_in_order():
    scores, mask, classes = torch.randn(4, 3), torch.tensor([True, False, True, True]), torch.tensor([0, 1, 0, 2])
    with ItemRecorder(CPU) as recorder:
        padded = scores.new_zeros(5, 3)
        loss = F.cross_entropy(scores, classes) / 4
        found = mask.sum()
    assert padded.shape == (5, 3) and found == 3
    assert noted(recorder) == [
        Noted("size", (5.0, 3.0)),
        Noted("mean", (4.0,)),
        Noted("divide", (4.0,)),
        Noted("count", (3.0,)),
    ]
    assert torch.allclose(loss, F.cross_entropy(scores, classes) / 4)


def test_a_place_is_a_line_and_how_often_it_was_reached():
    with ItemRecorder(CPU) as recorder:
        for size in (2, 3):
            torch.zeros(size)
        torch.zeros(2)
    (first, one), (again, two), (other, three) = recorder.places
    assert first == again != other and (one, two, three) == (0, 1, 0)


def test_the_forward_goes_on_with_the_totals():
    ones, mask = torch.ones(6), torch.tensor([True, True])

    def forward(recorder: ItemRecorder) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with recorder:
            return torch.zeros(2, 3), ones / 2, mask.sum()

    recorders = [ItemRecorder(CPU)]
    for _ in range(2):  # from one line, which is part of what a place is
        padded, quotient, count = forward(recorders[-1])
        size, division, number = recorders[0].places
        totals = {
            size: Total((LARGEST, OWN), (7.0, 9.0)),
            division: Total((SUM,), (4.0,)),
            number: Total((SUM,), (5.0,)),
        }
        recorders.append(ItemRecorder(CPU, totals=totals))
    assert padded.shape == (7, 3) and quotient[0] == 0.25 and count == 5
    assert count.dtype == torch.int64
    assert noted(recorders[1]) == noted(recorders[0]), "what is noted are the forward's own numbers"


def test_counts_are_left_alone_if_they_are_not_asked_for():
    mask = torch.tensor([True])
    with ItemRecorder(CPU, counts=False) as recorder:
        mask.sum()
    assert not recorder.places


def test_what_is_no_number_of_items_is_not_noted():
    ones, trained = torch.ones(2), torch.tensor(3.0, requires_grad=True)
    with ItemRecorder(CPU) as recorder:
        ones / ones
        ones / trained
        ones / torch.tensor(True)
        torch.zeros(1, 1, 1, 1, 1, 1, 1)  # more sizes than are exchanged
        ones.sum()
    assert not recorder.places


def test_what_is_drawn_is_noted_with_its_shape():
    torch.manual_seed(0)
    ones = torch.ones(4)
    with ItemRecorder(CPU) as recorder:
        drawn = torch.rand(3, 2)
        F.dropout(ones, 0.5)
        F.dropout(ones, 0.5, training=False)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3, 2))
    assert [one.what for one in noted(recorder)] == ["draw"] * 3
    assert [[drawn.shape for drawn in one.drawn] for one in noted(recorder)] == [[(3, 2)], [(4,)], []]


def test_batch_normalisation_may_be_left_out():
    one_value = torch.randn(1, 4)
    with ItemRecorder(CPU, leaves_out_statistics=True):
        assert torch.equal(F.batch_norm(one_value, None, None, training=True), one_value)
        assert torch.equal(F.batch_norm(input=one_value, running_mean=None, running_var=None), one_value)


def test_the_largest_whole_number_is_a_size_and_others_are_none():
    lengths, scores = torch.tensor([3, 5]), torch.randn(4)

    def forward(recorder: ItemRecorder) -> torch.Tensor:
        with recorder:
            lengths.min(), scores.max(), lengths.max(0)
            return lengths.max()

    totals = {}
    for expected in (5, 8):  # from one line, which is part of what a place is
        recorder = ItemRecorder(CPU, totals=totals)
        assert forward(recorder) == expected
        assert noted(recorder) == [Noted("size", (5.0,))]
        totals = {place: Total((LARGEST,), (8.0,)) for place in recorder.places}
