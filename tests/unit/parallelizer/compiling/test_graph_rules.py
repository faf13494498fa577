"""What is found in graphs of forwards, as PyTorch's compiler hands them to a back end."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moreh_ap.parallelizer.compiling import graph_rules


def graph_of(function):
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(torch.randn(4, 3, requires_grad=True))
    (graph,) = found
    return graph


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(),
        lambda x: torch.mean(x, dim=0),
        lambda x: x.mean(axis=(-2, 1)),
        lambda x: F.mse_loss(x, torch.zeros_like(x)),
        lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
        lambda x: torch.nn.L1Loss()(x, torch.zeros_like(x)),
        lambda x: x / (x > 0).sum(),
    ],
)
def test_rows_meet(function):
    assert graph_rules.rows_meet(graph_of(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
        lambda x: F.layer_norm(x, (3,)).sum(1),
        lambda x: x / (x > 0).sum(1, keepdim=True),
    ],
)
def test_rows_do_not_meet(function):
    graph = graph_of(function)
    assert graph_rules.rows_meet(graph) == graph_rules.draws(graph) == graph_rules.names_cuda(graph) == ""


@pytest.mark.parametrize(
    ("function", "is_raised"),
    [
        (lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="none"), "mse_loss"),
        (lambda x: x.log_softmax(-1), "log_softmax"),
        (lambda x: x.softmax(-1).mean(), ""),
    ],
)
def test_losses_are_found_that_a_plan_in_bfloat16_raises(function, is_raised):
    found = graph_rules.is_raised(graph_of(function))
    assert is_raised in found and bool(found) == bool(is_raised)


@pytest.mark.parametrize(
    ("function", "is_drawn"),
    [
        (lambda x: F.dropout(x, 0.1), True),
        (lambda x: torch.nn.Dropout(0.1)(x), True),
        (lambda x: F.dropout(x, 0.1, training=False), False),
        (lambda x: F.dropout(x, 0.0, True), False),
        (lambda x: x + torch.rand_like(x), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x), False),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), True),
    ],
)
def test_draws(function, is_drawn):
    assert bool(graph_rules.draws(graph_of(function))) == is_drawn


@pytest.mark.parametrize(
    ("function", "is_in_place"),
    [
        (lambda x: F.relu(x * 2, inplace=True), True),
        (lambda x: (x * 2).add_(1), True),
        (lambda x: F.relu(x * 2), False),
    ],
)
def test_changes_in_place(function, is_in_place):
    assert bool(graph_rules.changes_in_place(graph_of(function))) == is_in_place


def test_losses_in_a_region_that_is_recomputed():
    def forward(x):
        return torch.utils.checkpoint.checkpoint(lambda x: x.square().mean() + x, x, use_reentrant=False)

    assert graph_rules.rows_meet(graph_of(forward))
