"""Which maxima and minima are those of all whole numbers in a tensor, which sums may be loads of experts, which means
are of constants, and what may divide by a count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.mean_functions import (
    DIVISIONS,
    EXTREMES,
    SMALLEST,
    is_constant,
    is_extreme,
    is_load,
    may_divide,
)
from moreh_ap.parallelizer.loss.meta_reduction import MetaReduction

LENGTHS = torch.tensor([3, 5, 4])


@pytest.mark.parametrize(
    ("args", "kwargs", "wanted"),
    [
        ((LENGTHS,), {}, True),
        ((LENGTHS.int(),), {}, True),
        ((LENGTHS, 0), {}, False),
        ((LENGTHS,), {"dim": 0}, False),
        ((LENGTHS, LENGTHS), {}, False),
        ((LENGTHS.float(),), {}, False),
        ((LENGTHS > 3,), {}, False),
        ((LENGTHS[0],), {}, False),
    ],
)
def test_an_extreme_is_one_number_of_a_whole_tensor(args, kwargs, wanted):
    assert is_extreme(args, kwargs) is wanted


def test_minima_are_extremes():
    assert {torch.min, torch.Tensor.amin} <= SMALLEST < EXTREMES


MASK_EN = torch.tensor([[True, False, True], [False, False, False]])


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "wanted"),
    [
        (torch.Tensor.sum, (MASK_EN, -1), {}, True),
        (torch.Tensor.sum, (MASK_EN.long()[:, None],), {"dim": (-1, -2)}, True),
        (torch.any, (MASK_EN[0],), {}, True),
        (torch.any, (MASK_EN[0].long(),), {}, False),
        (torch.Tensor.sum, (MASK_EN,), {}, False),  # a count
        (torch.Tensor.sum, (MASK_EN.float(), -1), {}, False),
        (torch.Tensor.sum, (MASK_EN.long(), (0, 1)), {}, False),
        (torch.Tensor.sum, (LENGTHS, 0), {}, False),
    ],
)
def test_a_load_is_a_number_for_each_expert_or_whether_any_row_goes_to_one(func, args, kwargs, wanted):
    assert is_load(func, args, kwargs) is wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (torch.eye(3), True),
        (torch.eye(3) / 2, False),
        (torch.eye(3, requires_grad=True), False),
        (torch.eye(3, device="meta"), False),
        (torch.eye(3, dtype=torch.complex64), False),
        (FakeTensorMode().from_tensor(torch.eye(3)), False),
    ],
)
def test_constants_are_whole_numbers_that_can_be_read(value, wanted):
    assert is_constant(value) is wanted


def test_a_mean_of_a_forward_that_is_followed_on_meta_reads_nothing():
    """Pipelines and micro-batches follow forwards so: one that averages scores of experts was refused."""
    with MetaReduction(torch.device("cpu")), torch.no_grad():
        assert torch.randn(4, 3, device="meta").mean(0).shape == (3,)


@pytest.mark.parametrize("reduction", ["sum", "none", "mean"])
def test_a_loss_of_scores_on_meta_takes_real_labels(reduction):
    """transformers sums where it accumulates gradients: a pipeline could not be cut for its Trainer."""
    scores, labels = torch.empty(4, 5, device="meta"), torch.tensor([0, 1, -100, 2])
    with MetaReduction(torch.device("cpu")) as found:
        loss = F.cross_entropy(scores, labels, reduction=reduction)
        F.binary_cross_entropy_with_logits(scores, torch.ones(4, 5), reduction=reduction)
    assert loss.is_meta and [count.item() for count in found.local_denominators] == [3, 20] * (reduction == "mean")


class Divisions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.noted = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.noted |= func in DIVISIONS and may_divide(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


LOSS, COUNT, LEARNED = torch.tensor(6.0), torch.tensor(2), torch.tensor(2.0, requires_grad=True)


@pytest.mark.parametrize(
    ("divide", "wanted"),
    [
        (lambda: LOSS / COUNT, True),
        (lambda: LOSS.clone().div_(COUNT), True),
        (lambda: torch.div(LOSS, other=COUNT), True),
        (lambda: LOSS * (1 / COUNT), True),
        (lambda: LOSS * COUNT.reciprocal(), True),
        (lambda: LOSS / COUNT.item(), True),
        (lambda: LOSS / max(int(COUNT), 1), True),
        (lambda: LOSS / 2, False),
        (lambda: LOSS / LEARNED, False),
        (lambda: LOSS * COUNT, False),
        (lambda: LOSS.item() / 2, False),
    ],
)
def test_what_may_divide_by_a_count(divide, wanted):
    with Divisions() as mode:
        divide()
    assert mode.noted is wanted


def test_batch_normalisation_divides_by_no_count_of_the_script():
    recorder = GlobalReduction(torch.device("cpu"), record=True)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    with recorder:
        F.cross_entropy(model(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0]))
    assert recorder.saw == {"statistics"}
    with recorder:
        model(torch.randn(4, 3)).sum() / torch.tensor(4)
    assert recorder.saw == {"statistics", "divisions"}
