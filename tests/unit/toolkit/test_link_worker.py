"""What workers send each other in `moreh-ap doctor`, and how wrong values are counted."""

from __future__ import annotations

import itertools

import torch

from moreh_ap.toolkit.link_worker import SIZES, LinkExecutor, _checked


def test_every_worker_sends_other_values_which_float32_holds_exactly():
    values = [LinkExecutor(rank, 4, "cpu").values_of(rank, SIZES[0]) for rank in range(4)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(values, 2))
    for size in SIZES:
        sent = LinkExecutor(0, 4, "cpu").values_of(3, size)
        assert sent.dtype == torch.float32 and sent.min() >= 1 and 4 * sent.max() < 2**24
        assert torch.equal(sent, sent.round())


def test_wrong_values_are_counted_and_the_first_is_named():
    right = torch.arange(4.0)
    wrong = torch.tensor([0.0, 1.0, 7.0, 8.0])
    received = _checked([(right, right, 0.1), (wrong, right, 0.2)])
    assert (received.num_wrong, received.num_elements, received.seconds) == (2, 8, 0.2)
    assert received.example == "element 2 of 4 is 7, not 2"
    assert _checked([(right, right, 0.1)]).num_wrong == 0
