"""How far results of rows may differ: the tolerance is that of the arithmetic in use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moreh_ap.parallelizer.rounding import TOLERANCE_BF16, TOLERANCE_FP32, TOLERANCE_TF32
from moreh_ap.parallelizer.trial import row_comparison
from moreh_ap.parallelizer.trial.dry_run import Refused
from moreh_ap.parallelizer.trial.row_comparison import (
    close,
    kind_of,
    means_beside_rows,
    sort_by_class,
    without_meaning,
)

MODELS = {"linear": nn.Linear(2, 2), "convolution": nn.Conv1d(1, 1, 1), "recurrent": nn.GRU(2, 2)}


@pytest.fixture(autouse=True)
def flags():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True  # as PyTorch begins
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def tolerance(model, device="cuda", autocast=None):
    return row_comparison.tolerance_of(SimpleNamespace(module=model, device=torch.device(device), autocast=autocast))


@pytest.mark.parametrize(
    ("name", "expected"), [("linear", TOLERANCE_FP32), ("convolution", TOLERANCE_TF32), ("recurrent", TOLERANCE_TF32)]
)
def test_libraries_round_to_tf32_by_default_and_products_of_pytorch_do_not(name, expected):
    assert tolerance(MODELS[name]) == expected
    assert tolerance(MODELS[name], "cpu") == TOLERANCE_FP32
    torch.backends.cudnn.allow_tf32 = False
    assert tolerance(MODELS[name]) == TOLERANCE_FP32


def test_a_script_may_switch_it_on_for_all_products():
    torch.backends.cuda.matmul.allow_tf32 = True
    assert tolerance(MODELS["linear"]) == TOLERANCE_TF32
    assert tolerance(MODELS["linear"], autocast=torch.bfloat16) == TOLERANCE_BF16


def test_factors_that_were_rounded_to_tf32_are_within_its_tolerance_and_not_within_that_of_float32():
    torch.manual_seed(0)
    left, right = torch.randn(64, 256), torch.randn(256, 64)
    # 10 bits of a float32's 23 are kept
    rounded = [((one.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for one in (left, right)]
    assert close(rounded[0] @ rounded[1], left @ right, TOLERANCE_TF32)
    assert not close(rounded[0] @ rounded[1], left @ right, TOLERANCE_FP32)


def test_a_mean_that_counts_as_much_in_one_row_as_in_two_is_over_something_else():
    heads, batch, loss = 11, 12, 2.0
    places = {0: heads, 2: batch, 3: 13}  # site 1 is a loss, and one row came to fewer sites
    both, one = ([torch.tensor(count) for count in counts] for counts in ([2.0, loss, 2.0, 2.0], [2.0, 1.0, 1.0]))
    assert means_beside_rows(places, both, one) == {heads}


NAN = torch.tensor(float("nan"))


@pytest.mark.parametrize(
    ("outputs", "word"),
    [
        ([torch.zeros(())], "zero"),
        ([NAN, torch.ones(2)], "finite"),
        ([NAN.expand(2), 3], "finite"),
        ([torch.tensor([1.0, float("nan")]), NAN.expand(3)], ""),
        ([torch.zeros(2), 3], ""),
        ([], ""),
    ],
)
def test_zero_losses_and_nan_say_nothing_about_rows(outputs, word):
    run = SimpleNamespace(outputs=[*outputs, NAN], attributes={"kept": 1}, runs_in_stages=False)
    assert word in without_meaning(run) and bool(without_meaning(run)) is bool(word)
    run.runs_in_stages = True
    assert "finite" not in without_meaning(run)


def test_rows_of_a_class_are_next_to_each_other_whatever_it_is_written_as():
    inputs, classes = torch.randn(6, 3), torch.tensor([2, 0, 1, 2, 0, 1])
    assert sort_by_class([inputs, classes], range(6)) == [1, 4, 2, 5, 0, 3]
    assert sort_by_class([inputs, torch.nn.functional.one_hot(classes).float()], [0, 1, 3, 4]) == [0, 3, 1, 4]
    assert sort_by_class([classes, classes > 0], range(6)) == [1, 4, 2, 5, 0, 3], "the coarser one first"


def test_rows_without_classes_stay_in_order():
    assert sort_by_class([torch.randn(4, 3), torch.ones(4), torch.zeros(4, 3, 64, 64)], [3, 0, 2]) == [3, 0, 2]


def test_rows_that_come_in_the_order_of_their_lengths_keep_it():
    lengths, classes = torch.tensor([9, 7, 7, 2]), torch.tensor([1, 0, 1, 0])
    assert sort_by_class([classes, lengths], range(4)) == [0, 1, 2, 3]


def test_what_every_worker_has_is_alike_on_all_however_much_is_rounding():
    """The means of two workers differ by 2 per cent: neither is the mean of both."""
    together, apart = torch.tensor(1.0), [torch.tensor(0.99), torch.tensor(1.01)]
    assert kind_of("output 0", together, [together + 0.01] * 2, 0.05, TOLERANCE_FP32) == "same"
    assert kind_of("output 0", together, [one / 2 for one in apart], 0.05, TOLERANCE_FP32) == "share"
    with pytest.raises(Refused):
        kind_of("output 0", together, apart, 0.05, TOLERANCE_FP32)
