"""How large packed weights are to the planner."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from moreh_ap.session.planning.frozen_weights import trains_weights, with_frozen_weights
from moreh_ap.session.planning.model_profiling import profile_model
from moreh_ap.session.planning.packed_weights import (
    constant_bytes,
    has_packed_weights,
    num_values,
    stored_bytes,
)


class Packed(nn.Linear):
    """A layer of 64 x 64 weights of 4 bits, with a constant for each 64 of them."""

    def __init__(self):
        super().__init__(64, 64, bias=False)
        self.weight = nn.Parameter(torch.zeros(64 * 64 // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = SimpleNamespace(absmax=torch.zeros(64), offset=None, state2=None, shape=(64, 64))


def model():
    blocks = [nn.Sequential(Packed(), nn.Linear(64, 2, bias=False)) for _ in range(3)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(2, 2, bias=False))


def test_a_packed_weight_counts_as_what_it_stands_for_and_takes_what_it_takes():
    weight, plain = Packed().weight, nn.Parameter(torch.zeros(3, 4))
    assert (num_values(weight), stored_bytes(weight), constant_bytes(weight)) == (4096, 2048, 256)
    assert (num_values(plain), stored_bytes(plain), constant_bytes(plain)) == (12, 48, 0)
    assert has_packed_weights(model()) and not has_packed_weights(nn.Linear(2, 2))


def test_the_profile_of_a_model_has_them_frozen_and_packed():
    root = model()
    assert not trains_weights(root)
    profile = profile_model(root, None, (root, (torch.zeros(4, 64),), {}), 4)
    found = with_frozen_weights(profile, root, is_shape=False).frozen
    assert found is not None and found.is_packed
    assert (found.block_bytes, found.constant_bytes) == (2048 / 4096, 256 / 4096)
