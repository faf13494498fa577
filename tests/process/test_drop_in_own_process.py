"""Scripts in public style with the bare line: small models run in the script's process, with one device's numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drop_in_runs import BothInTurn, assert_same, num_losses

pytestmark = pytest.mark.rotating  # one more way to run each


@pytest.fixture(scope="module")
def both_with_the_bare_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothInTurn]:
    both = BothInTurn(tmp_path_factory.mktemp("bare"), plan=None)
    yield both
    both.close()


@pytest.mark.parametrize(
    "script",
    [
        "drop_in_gan.py",
        "drop_in_lstm.py",
        "drop_in_rl.py",
        "drop_in_sequences.py",
        "drop_in_objects.py",
        "drop_in_penalties.py",
        "drop_in_surgery.py",
        "drop_in_second_derivatives.py",
        "drop_in_coins.py",
        "drop_in_own_parameters.py",
        "drop_in_weights.py",
        "drop_in_chance.py",
        "drop_in_vision.py",
        "drop_in_peft_adapters.py",
    ],
)
def test_the_bare_line_prints_the_numbers_of_one_device(both_with_the_bare_line, tmp_path, script):
    ours, reference = both_with_the_bare_line(script, tmp_path)
    assert num_losses(reference) > 5, reference
    assert_same(ours, reference)
