"""Losses over many logits: those of one process, without copies of the logits on the workers."""

from __future__ import annotations

import re

import pytest
from user_script import UserScript

pytestmark = pytest.mark.rotating  # one more loss


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> str:
    """What one process prints."""
    with UserScript("train_many_logits.py", cwd=tmp_path_factory.mktemp("reference")) as reference:
        return reference.succeed()


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_a_loss_in_chunks_is_that_of_one_process(tmp_path, expected, plan):
    with UserScript("train_many_logits.py", plan, cwd=tmp_path, MOREH_NUM_DEVICES="2", MOREH_STRICT="1") as script:
        found = script.succeed()
    assert re.findall("copies (.)", expected) == ["1", "1"], "PyTorch keeps log-probabilities"
    assert re.findall("copies (.)", found)[-2:] == ["0", "0"]
    numbers = [[float(one) for one in re.findall(r"(?:loss|norm) (\S+)", out)] for out in (found, expected)]
    assert len(numbers[1]) == 4
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


@pytest.mark.parametrize(
    "vocabulary, kind, kept", [(2**13, "plain", 1), (2**13, "smoothed", 1), (2**13, "masked", 1), (2**12, "plain", 2)]
)
def test_a_loss_outside_of_the_model_leaves_no_log_probabilities_on_workers(tmp_path, vocabulary, kind, kept):
    size = str(vocabulary), kind
    with UserScript("train_loss_outside.py", *size, cwd=tmp_path) as reference:
        expected = reference.succeed()
    with UserScript("train_loss_outside.py", *size, "shard=2", cwd=tmp_path, MOREH_NUM_DEVICES="2") as script:
        found = script.succeed()
    left = re.findall("large (.)", found)
    assert left[:2] == ["0", str(kept)], "logits, and the log-probabilities of a smaller vocabulary"
    numbers = [[float(one) for one in re.findall(r"(?:loss|norm) (\S+)", out)] for out in (found, expected)]
    assert len(numbers[1]) == 4
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
