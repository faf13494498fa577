"""Denominators of other inputs, from the operations that lead to them; the forward itself is not followed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moreh_ap.parallelizer.loss.input_operations import InputOperationRecorder, InputOperations
from moreh_ap.parallelizer.loss.meta_reduction import MetaReduction

CPU = torch.device("cpu")
WEIGHT = torch.randn(4, 5, device="meta")
CLASS_WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.1])


def scores(x: Tensor) -> Tensor:
    return x @ WEIGHT  # what depends on a parameter is on meta


def shifted(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores(x)[:-1], labels[1:])


def padded(x: Tensor, labels: Tensor) -> Tensor:
    return shifted(x, labels.masked_fill(labels == 0, -100))


def two_means(x: Tensor, labels: Tensor) -> Tensor:
    first, second = labels.chunk(2)
    return F.cross_entropy(scores(x)[:3], first) + F.nll_loss(scores(x)[3:].log_softmax(1), second)


def written(x: Tensor, labels: Tensor) -> Tensor:
    own = labels.clone()
    own[own == 2] = -100
    return F.cross_entropy(scores(x), own)


def written_through_a_view(x: Tensor, labels: Tensor) -> Tensor:
    own = labels + 0
    own[2:].fill_(-100)
    return F.cross_entropy(scores(x), own)


def depends(x: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(scores(x), labels)
    return loss if (labels >= 0).all() else loss + F.cross_entropy(scores(x), labels.flip(0)[2:].repeat(2)[:6])


def whole_number(x: Tensor, labels: Tensor) -> Tensor:
    return scores(x)[: int((labels == 2).sum())].mean()


def writes_and_reads(x: Tensor, labels: Tensor) -> Tensor:
    own = labels.clone()
    own[own == 2] = -100
    return F.cross_entropy(scores(x), own) if own.any() else scores(x).sum()


def from_elsewhere(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores(x), torch.where(CLASS_WEIGHT[0] > 0, labels, labels))


def selects(x: Tensor, labels: Tensor) -> Tensor:
    valid = (labels >= 0).nonzero().squeeze(1)
    return scores(x)[valid].mean()


def selects_by_mask(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores(x), labels) + scores(x)[: len(labels[labels >= 0])].mean()


def makes_as_many(x: Tensor, labels: Tensor) -> Tensor:
    return scores(x)[torch.arange(labels.max() + 1)].mean()


def reads_an_array(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores(x), torch.from_numpy(labels.numpy()))


def sets_data(x: Tensor, labels: Tensor) -> Tensor:
    own = labels.clone()
    own.data = labels.flip(0)
    return F.cross_entropy(scores(x), own)


def reads_constants(x: Tensor, labels: Tensor) -> Tensor:
    positions = torch.arange(len(labels))
    packed = positions.diff() != 1
    return F.cross_entropy(scores(x), labels) if not packed.any() else scores(x).sum()


Forward = Callable[[Tensor, Tensor], Tensor]


def inputs(seed: int) -> list[Any]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (6,), generator=random)
    labels[torch.rand(6, generator=random) < 0.4] = -100
    return [torch.randn(6, 4, generator=random), labels]


def follow(forward: Forward, leaves: list[Any]) -> tuple[list[float], InputOperations | None]:
    """Returns the denominators of a forward, and the operations that give them."""
    recorder = InputOperationRecorder(leaves)
    with torch.no_grad(), MetaReduction(CPU, recorder=recorder) as reduction:
        forward(*leaves)
    found = [float(one) for one in reduction.local_denominators]
    return found, recorder.operations(len(found))


def repeat(operations: InputOperations, leaves: list[Any]) -> list[float] | None:
    """Returns the denominators for other inputs; None where the forward does something else with them."""
    reduction = MetaReduction(CPU)
    goes_on = operations.run(leaves, reduction.compute)
    return [float(one) for one in reduction.local_denominators] if goes_on else None


@pytest.mark.parametrize("forward", [shifted, padded, two_means, written, written_through_a_view])
def test_denominators_of_other_inputs(forward: Forward) -> None:
    _, operations = follow(forward, inputs(0))
    assert operations is not None
    expected = [follow(forward, inputs(seed))[0] for seed in range(1, 9)]
    assert [repeat(operations, inputs(seed)) for seed in range(1, 9)] == expected
    assert len({tuple(one) for one in expected}) > 1  # or it would show nothing


@pytest.mark.parametrize("forward", [depends, whole_number])
def test_numbers_that_lead_elsewhere(forward: Forward) -> None:
    """What was read is compared: only inputs that lead the same way have these denominators."""
    _, operations = follow(forward, inputs(0))
    assert operations is not None and operations.reads
    found = [repeat(operations, inputs(seed)) for seed in range(40)]
    assert None in found and found[0] is not None
    for seed, denominators in enumerate(found):
        assert denominators is None or denominators == follow(forward, inputs(seed))[0]


@pytest.mark.parametrize(
    "forward",
    [writes_and_reads, from_elsewhere, selects, selects_by_mask, makes_as_many, reads_an_array, sets_data],
)
def test_forwards_that_are_followed_anew(forward: Forward) -> None:
    assert follow(forward, inputs(0))[1] is None


def test_what_leads_to_no_denominator_is_not_kept() -> None:
    def masked(x: Tensor, labels: Tensor) -> Tensor:
        mask = (labels[:, None] == labels[None, :]).float().cumsum(0)  # (6, 6), for an attention
        return F.cross_entropy(scores(x) + mask.sum(1, keepdim=True), labels)

    operations = follow(masked, inputs(0))[1]
    assert operations is not None
    assert [one.function for one in operations.operations] == [F.cross_entropy]


def test_numbers_of_no_input_are_not_read_again() -> None:
    operations = follow(reads_constants, inputs(0))[1]
    assert operations is not None and not operations.reads
    assert [one.function for one in operations.operations] == [F.cross_entropy]


def test_denominators_that_no_torch_function_adds() -> None:
    recorder = InputOperationRecorder(inputs(0))
    with torch.no_grad(), MetaReduction(CPU, recorder=recorder) as reduction:
        shifted(*inputs(0))
        reduction.local_denominators.append(torch.ones(()))
    assert recorder.operations(len(reduction.local_denominators)) is None
