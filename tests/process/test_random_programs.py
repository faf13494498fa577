"""Programs drawn at random change models, optimizers and gradients, and read the numbers of one device."""

from __future__ import annotations

import pytest
from random_programs import differences

EACH = 4


@pytest.mark.rotating  # four more programs each
@pytest.mark.parametrize("first", range(0, 16 * EACH, EACH))
def test_whatever_a_script_changes_between_steps(accelerator, first):
    accelerator("shard=2" if first // EACH % 2 else "replicate=2")
    assert not [line for seed in range(first, first + EACH) for line in differences(seed)]
