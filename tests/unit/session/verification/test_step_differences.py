"""What counts as a difference from one device, and where it begins."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.protocol.messages.models import ModuleSum
from moreh_ap.session.verification.step_differences import (
    Difference,
    first_wrong_module,
    is_wrong_output,
    smallest_gradient,
    wrong_gradients,
    wrong_states,
)

ONES = torch.ones(4)


def difference(by: float, size: float = 1.0, dtype: torch.dtype = torch.float32) -> Difference:
    expected = (ONES * size).to(dtype)
    return Difference.of("weight", expected.double() + torch.tensor([0.0, by, 0.0, 0.0]), expected)


def test_a_difference_has_norms_and_the_largest_element():
    found = Difference.of("w", torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    assert (found.largest, found.size, found.expected_norm) == (0.5, 4.0, 5.0)
    assert str(found) == "norms 5.408327 and 5, largest difference 0.5"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_on_both_sides_is_equal(value: float):
    both = torch.tensor([1.0, value])
    assert Difference.of("w", both, both).largest == 0.0
    assert Difference.of("w", both, ONES[:2]).relative(0.0) == float("inf")
    assert Difference.of("w", ONES[:2], both).relative(0.0) == float("inf")


def test_an_empty_tensor_is_equal():
    assert Difference.of("w", torch.empty(0, 3), torch.empty(0, 3)).relative(0.0) == 0.0


@pytest.mark.parametrize(
    ("by", "dtype", "reduced", "is_wrong"),
    [
        (0.9e-4, torch.float32, False, False),
        (1.1e-4, torch.float32, False, True),
        (1.1e-4, torch.float32, True, False),
        (0.03, torch.float32, True, True),
        (0.05, torch.bfloat16, False, False),
    ],
)
def test_outputs_have_a_limit(by: float, dtype: torch.dtype, reduced: bool, is_wrong: bool):
    assert is_wrong_output(difference(by, dtype=dtype), reduced) is is_wrong


def test_a_loss_near_zero_is_compared_with_a_hundredth():
    assert not is_wrong_output(difference(0.9e-6, size=1e-9), False)
    assert is_wrong_output(difference(1.1e-6, size=1e-9), False)


def test_small_gradients_are_compared_with_the_model_s_largest():
    large, noise = difference(0.0, size=1.0), difference(0.9e-6, size=1e-8)
    assert smallest_gradient([large, noise]) == pytest.approx(1e-3)
    assert wrong_gradients([large, noise]) == []
    assert wrong_gradients([noise]) == [noise]


def test_states_agree_to_a_few_roundings():
    close, far = difference(0.9e-5), difference(1.1e-5)
    assert wrong_states([close, far]) == [far]


def sums(**squares: float) -> list[ModuleSum]:
    return [ModuleSum(path, 8, 1.0, value) for path, value in squares.items()]


def test_the_first_module_whose_sums_differ_is_named():
    expected = [ModuleSum("a", 16, 2.0, 8.0), ModuleSum("b", 16, 2.0, 8.0), ModuleSum("c", 16, 2.0, 8.0)]
    assert first_wrong_module([sums(a=4, b=4, c=4), sums(a=4, b=4, c=4)], expected) is None
    assert first_wrong_module([sums(a=4, b=4, c=4), sums(a=4, b=4.1, c=5)], expected) == "b"


def test_modules_that_every_worker_computes_whole_are_compared_once():
    expected = [ModuleSum("a", 8, 1.0, 4.0)]
    assert first_wrong_module([sums(a=4), sums(a=4)], expected) is None
    assert first_wrong_module([sums(a=5), sums(a=4)], expected) == "a"


def test_stages_have_modules_of_their_own():
    expected = [ModuleSum("a", 8, 1.0, 4.0), ModuleSum("b", 8, 1.0, 4.0)]
    assert first_wrong_module([sums(a=4), sums(b=5)], expected) == "b"


def test_modules_of_which_only_a_part_was_summed_are_left_out():
    assert first_wrong_module([sums(a=4)], [ModuleSum("a", 12, 9.0, 9.0)]) is None
