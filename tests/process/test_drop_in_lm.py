"""Training scripts for language models in the style of public ones, with and without the one line: the same numbers."""

from __future__ import annotations

import pytest
from drop_in_runs import assert_same

pytestmark = pytest.mark.rotating  # one more script each


@pytest.mark.parametrize(
    "script, lines",
    [
        ("drop_in_weights.py", 22),
        ("drop_in_llms_from_scratch.py", 24),
        ("drop_in_annotated.py", 6),
        ("drop_in_distil.py", 28),
        ("drop_in_seq2seq.py", 17),
        ("drop_in_generate.py", 26),
        ("drop_in_trainer_classes.py", 50),
        ("drop_in_chance.py", 32),
    ],
)
def test_a_language_model_s_script_prints_what_one_device_prints(both_in_turn, tmp_path, script, lines):
    ours, reference = both_in_turn(script, tmp_path)
    assert len(reference) >= lines, reference
    assert_same(ours, reference)
