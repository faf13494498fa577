"""How far the numbers of a step are from those of one device, and whether that is rounding.

Decides what is compared with what, and the limits. Must not know where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, isnan, sqrt

import torch
from torch import Tensor

from moreh_ap.protocol.messages.models import ModuleSum
from moreh_ap.session.verification.equivalence import BF16_LOSS_LIMIT, SMALLEST_GRADIENT

OUTPUT_LIMIT, GRADIENT_LIMIT, STATE_LIMIT = 1e-4, 1e-3, 1e-5
"""Limits in float32, relative to the largest element. States are compared after steps from equal gradients."""

MODULE_LIMIT = 1e-5
"""Where a difference began is looked for below the limit above which it is one: it grows on its way."""

SMALLEST_OUTPUT = 1e-2
"""Outputs are compared relative to their largest element, or to this number if larger."""

SMALLEST_STATE = 1e-6
_ROUNDINGS = 16
"""How many roundings of a tensor's own dtype are allowed where that is less exact than float32."""


@dataclass(frozen=True)
class Difference:
    """One tensor on several devices and on one.

    Attributes:
        name: Of the tensor.
        largest: The largest difference of two elements.
        size: The largest element on one device.
        norm: Of the tensor on several devices.
        expected_norm: Of the tensor on one device.
        rounding: What one rounding of its dtype is, relative.
    """

    name: str
    largest: float
    size: float
    norm: float
    expected_norm: float
    rounding: float

    @staticmethod
    def of(name: str, got: Tensor, expected: Tensor) -> Difference:
        """Compares two tensors of one shape; elements that are the same infinity or not a number are equal."""
        rounding = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        ours, theirs = got.to_dense().double(), expected.to_dense().double()
        if not ours.numel():
            return Difference(name, 0.0, 0.0, 0.0, 0.0, rounding)
        differences = torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, (ours - theirs).abs())
        largest = float(differences.max())
        finite = theirs[theirs.isfinite()].abs()
        size = float(finite.max()) if finite.numel() else 0.0
        return Difference(
            name, float("inf") if isnan(largest) else largest, size, float(ours.norm()), float(theirs.norm()), rounding
        )

    def relative(self, smallest: float) -> float:
        """Returns the largest difference relative to the largest element, or to `smallest` if larger."""
        return self.largest / max(self.size, smallest) if self.largest else 0.0

    def __str__(self) -> str:
        return f"norms {self.norm:.7g} and {self.expected_norm:.7g}, largest difference {self.largest:.2g}"


def wrong_gradients(differences: Sequence[Difference]) -> list[Difference]:
    """Returns the gradients that are not those of one device, in their order."""
    smallest = smallest_gradient(differences)
    return [one for one in differences if not one.relative(smallest) <= max(GRADIENT_LIMIT, _ROUNDINGS * one.rounding)]


def smallest_gradient(differences: Sequence[Difference]) -> float:
    """Returns what small gradients of a model are compared relative to, see `equivalence.py`."""
    return SMALLEST_GRADIENT * max((one.size for one in differences), default=0.0) or 1e-30


def wrong_states(differences: Iterable[Difference]) -> list[Difference]:
    """Returns the parameters and buffers that are not those of one device, in their order."""
    return [
        one for one in differences if not one.relative(SMALLEST_STATE) <= max(STATE_LIMIT, _ROUNDINGS * one.rounding)
    ]


def is_wrong_output(difference: Difference, reduced_precision: bool) -> bool:
    """Returns whether an output of a forward is not that of one device."""
    limit = BF16_LOSS_LIMIT if reduced_precision else max(OUTPUT_LIMIT, _ROUNDINGS * difference.rounding)
    return not difference.relative(SMALLEST_OUTPUT) <= limit


def first_wrong_module(got: Sequence[Sequence[ModuleSum]], expected: Sequence[ModuleSum]) -> str | None:
    """Returns the path of the first submodule whose outputs are not those of one device; None if each one's are.

    Args:
        got: The sums of each worker. Workers have their rows, heads or blocks of an output, or all of it.
        expected: The sums of one device, in the order of a forward.
    """
    of_workers = [{one.path: one for one in sums} for sums in got]
    for wanted in expected:
        found = [sums[wanted.path] for sums in of_workers if wanted.path in sums]
        if sum(one.num_elements for one in found) == wanted.num_elements:
            total, squares = sum(one.total for one in found), sum(one.squares for one in found)
        elif found and found[0].num_elements == wanted.num_elements:
            total, squares = found[0].total, found[0].squares
        else:
            continue  # a part of it is on several workers: not comparable by its sums
        if not _is_same(total, squares, wanted):
            return wanted.path
    return None


def _is_same(total: float, squares: float, wanted: ModuleSum) -> bool:
    if not isfinite(wanted.squares):
        return not isfinite(squares)
    size = sqrt(wanted.squares)
    allowed = MODULE_LIMIT * max(size, 1e-12)
    return abs(total - wanted.total) <= allowed and abs(sqrt(max(squares, 0.0)) - size) <= allowed
