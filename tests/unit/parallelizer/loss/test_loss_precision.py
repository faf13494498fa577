"""Losses of a forward that computes in bfloat16: float32, as under `torch.autocast`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moreh_ap.parallelizer.loss.loss_precision import Float32Losses
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction

CPU = torch.device("cpu")
CLASSES = torch.arange(30) % 7

LOSSES = {
    "cross_entropy": lambda x: F.cross_entropy(x, CLASSES, label_smoothing=0.1),
    "module": lambda x: torch.nn.CrossEntropyLoss(reduction="sum")(x, CLASSES),
    "log_softmax": lambda x: F.nll_loss(F.log_softmax(x, -1), CLASSES),
    "method": lambda x: x.log_softmax(dim=-1).mean(),
    "mse_loss": lambda x: F.mse_loss(x, torch.full_like(x, 0.25)),
    "binary": lambda x: F.binary_cross_entropy((x / 4).sigmoid(), torch.full_like(x, 0.25)),
    "with logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.25)),
    "huber": lambda x: F.huber_loss(input=x, target=torch.full_like(x, 0.25)),
    "divergence": lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1).roll(1, 0).detach(), reduction="batchmean"),
}


def numbers() -> torch.Tensor:
    torch.manual_seed(0)
    return (3 * torch.randn(30, 7)).bfloat16().requires_grad_()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_bfloat16_is_that_of_its_values_in_float32(name):
    low = numbers()
    with Float32Losses():
        loss = LOSSES[name](low)
    assert loss.dtype == torch.float32 and loss.item() != loss.bfloat16().item()
    whole = low.detach().float().requires_grad_()
    wanted = LOSSES[name](whole)
    probabilities_are_rounded = name in ("binary", "divergence")
    torch.testing.assert_close(loss, wanted, rtol=5e-3 if probabilities_are_rounded else 1e-6, atol=0)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(low.grad.float(), whole.grad, rtol=0.01, atol=float(whole.grad.abs().max()) / 100)


def test_layers_keep_their_precision():
    layer = torch.nn.Linear(7, 3).bfloat16()
    with Float32Losses():
        hidden = layer(F.layer_norm(numbers().softmax(-1).pow(2), (7,)))
    assert hidden.dtype == torch.bfloat16


def test_a_share_of_a_mean_is_float32_too():
    low = numbers()
    with GlobalReduction(CPU, record=True) as reduction, Float32Losses():
        loss = F.cross_entropy(low, CLASSES)
    assert loss.dtype == torch.float32 and len(reduction.local_denominators) == 1
    torch.testing.assert_close(loss, F.cross_entropy(low.float(), CLASSES), rtol=1e-6, atol=0)


def test_a_mean_of_many_half_precision_numbers_does_not_overflow_in_its_sum():
    many = torch.full((4096, 4), 100.0, dtype=torch.float16)  # whose sum is more than float16 has numbers for
    with GlobalReduction(CPU, record=True):
        assert float(many.mean()) == 100.0 and many.mean().dtype == torch.float16
        assert float(F.l1_loss(many, torch.zeros_like(many))) == 100.0
