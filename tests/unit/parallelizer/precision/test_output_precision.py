"""Large results stay as they were computed, and say that they are what was promised."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moreh_ap.parallelizer.precision.output_precision import LEAST_ROW_ELEMENTS, all_converted, as_promised, shapes_of

LOW, PROMISED = torch.bfloat16, torch.float32
Pair = collections.namedtuple("Pair", "loss logits")


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


def large() -> Tensor:
    return torch.ones(3, 2, LEAST_ROW_ELEMENTS // 2, dtype=LOW)


def settled(result: Any) -> Any:
    return as_promised(result, LOW, PROMISED)


@pytest.mark.parametrize("nest", [
    lambda loss, logits: (loss, logits),
    lambda loss, logits: [loss, logits],
    lambda loss, logits: {"loss": loss, "logits": logits},
    Pair,
    Output,
])  # fmt: skip
def test_small_results_are_converted_and_large_ones_stay(nest):
    logits = large()
    result = settled(nest(torch.tensor(1.5, dtype=LOW), logits))
    assert type(result) is type(nest(logits, logits))
    loss, kept = [leaf for leaf in _values(result) if leaf is not None]
    assert loss.dtype == PROMISED
    assert kept is logits and kept.dtype == LOW


def _values(result: Any) -> Any:
    if isinstance(result, Output):
        return vars(result).values()
    return result.values() if isinstance(result, dict) else result


def test_whether_a_tensor_stays_depends_on_its_rows_alone():
    sizes = [(1, LEAST_ROW_ELEMENTS), (0, LEAST_ROW_ELEMENTS), (5, LEAST_ROW_ELEMENTS - 1), (2 * LEAST_ROW_ELEMENTS,)]
    assert [settled(torch.ones(size, dtype=LOW)).dtype for size in sizes] == [LOW, LOW, PROMISED, PROMISED]


def test_other_dtypes_are_converted_and_whole_numbers_left_alone():
    assert settled(torch.ones(2, LEAST_ROW_ELEMENTS, dtype=torch.float16)).dtype == PROMISED
    assert settled(torch.ones(2, LEAST_ROW_ELEMENTS, dtype=torch.int64)).dtype == torch.int64


def test_containers_in_which_nothing_changes_stay_the_objects_that_they_are():
    result = {"logits": [large()], "other": object()}
    assert settled(result) is result
    output = Output(torch.tensor(1.0), large())
    assert settled(output) is output


def test_shapes_have_the_promised_dtype_and_the_layout():
    logits = large().transpose(1, 2)
    leaves = [settled(one) for one in (torch.tensor(1.0, dtype=LOW), logits, 7)]
    detached = [one.detach() if isinstance(one, Tensor) else one for one in leaves]
    loss, shape, number = shapes_of(leaves, detached)
    assert (loss.dtype, shape.dtype, number) == (PROMISED, PROMISED, 7)
    assert shape.device.type == "meta" and (shape.shape, shape.stride()) == (logits.shape, logits.stride())
    assert shapes_of(leaves[:1], detached[:1]) == detached[:1]


def test_all_can_be_converted_afterwards():
    logits = large().requires_grad_()
    (converted,) = all_converted((settled(logits),))
    assert converted.dtype == PROMISED
    converted.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == LOW
