"""Trains a family on one device and under a plan, and says how far apart they are: one cell of the matrix.

Decides what is recorded and what counts as equal. Must not know which families and plans there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from families import STEPS, Family
from torch import Tensor

from moreh_ap.session.verification.equivalence import (
    BF16_LOSS_LIMIT,
    GRADIENT_LIMIT,
    LOSS_LIMIT,
    SMALLEST_GRADIENT,
    WEIGHT_LIMIT,
    worst,
    worst_of_curve,
)

MAX_NORM = 0.5
"""For `clip_grad_norm_`; below every family's norm in every step, so that clipping always does something."""


@dataclass(frozen=True)
class Training:
    """What a run of a few steps gave, on the CPU.

    Attributes:
        losses: Of every step.
        norms: What `clip_grad_norm_` answered in every step.
        gradients: Of step 1, before clipping, by name.
        clipped: Of step 1, after clipping, by name.
        weights: The state dict after the last step; buffers too.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    clipped: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(family: Family, device: str) -> Training:
    """Trains as a script does: forward, backward, clip, step, for `STEPS` steps from a fixed seed."""
    model = family.build().to(device)
    optimizer = family.optimizer(model)
    losses, norms, gradients, clipped = [], [], {}, {}
    for step in range(STEPS):
        batch = {key: value.to(device) for key, value in family.batch(step).items()}
        loss = family.run(model, batch)
        loss.backward()
        if step == 0:
            gradients = _gradients(model)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        if step == 0:
            clipped = _gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    return Training([loss.item() for loss in losses], [norm.item() for norm in norms], gradients, clipped, weights)


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: parameter.grad.cpu().clone() for name, parameter in named if parameter.grad is not None}


@dataclass(frozen=True)
class Difference:
    """How far a run is from one device, each the worst of its kind and relative.

    Attributes:
        loss: Over the steps, relative to the loss.
        norm: Over the steps, of the gradient norm, relative to it.
        gradient: Of step 1, before and after clipping, relative to a tensor's largest element. See
            `SMALLEST_GRADIENT`.
        gradient_name: The parameter where that is.
        weight: After the last step, relative to a tensor's largest element.
        weight_name: The parameter or buffer where that is.
    """

    loss: float
    norm: float
    gradient: float
    gradient_name: str
    weight: float
    weight_name: str

    def exceeds(self, bf16: bool = False) -> list[str]:
        """What is too far apart, with its value and where; empty if nothing is. In bfloat16 only the loss counts."""
        wrong = []
        if not self.loss <= (BF16_LOSS_LIMIT if bf16 else LOSS_LIMIT):
            wrong.append(f"a loss differs by {self.loss:.1e}")
        if bf16:
            return wrong
        if not self.norm <= GRADIENT_LIMIT:
            wrong.append(f"a gradient norm differs by {self.norm:.1e}")
        if not self.gradient <= GRADIENT_LIMIT:
            wrong.append(f"the gradient of {self.gradient_name} differs by {self.gradient:.1e}")
        if not self.weight <= WEIGHT_LIMIT:
            wrong.append(f"the weight {self.weight_name} differs by {self.weight:.1e}")
        return wrong


def compare(got: Training, expected: Training) -> Difference:
    """Returns the differences.

    Raises:
        AssertionError: Parameters have a gradient on one side only, a shape is another, or the reference is no number.
    """
    assert all(map(isfinite, expected.losses)), expected.losses
    assert all(norm > MAX_NORM for norm in expected.norms), f"clipping must do something: norms {expected.norms}"
    gradient, gradient_name = max(
        _worst(got.gradients, expected.gradients, SMALLEST_GRADIENT * _largest(expected.gradients)),
        _worst(got.clipped, expected.clipped, SMALLEST_GRADIENT * _largest(expected.clipped)),
    )
    weight, weight_name = _worst(got.weights, expected.weights, 1e-12)
    return Difference(
        loss=worst_of_curve(got.losses, expected.losses),
        norm=worst_of_curve(got.norms, expected.norms),
        gradient=gradient,
        gradient_name=gradient_name,
        weight=weight,
        weight_name=weight_name,
    )


def _largest(tensors: dict[str, Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors.values())


def _worst(got: dict[str, Tensor], expected: dict[str, Tensor], smallest: float) -> tuple[float, str]:
    assert expected and got.keys() == expected.keys(), got.keys() ^ expected.keys()
    for name, wanted in expected.items():
        assert got[name].shape == wanted.shape, f"{name}: {got[name].shape} against {wanted.shape}"
    return worst(got, expected, smallest)
