"""Complaints of `tests/complaints.md` that no other test shows."""

from __future__ import annotations

import pytest
import torch
from one_line_models import tiny_gpt2
from rotating import rotating_from
from test_one_line_training import assert_same, batches, on_both


@pytest.fixture(params=rotating_from(1, ["replicate=2", "shard=2"]), autouse=True)
def session(request, accelerator):
    return accelerator(request.param)


def train(model, device, steps=3):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for ids, labels in batches(device)[:steps]:
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("use_reentrant", rotating_from(1, [True, False]))
def test_c22_checkpointing_works_either_way(use_reentrant):
    def script(device):
        model = tiny_gpt2().to(device).train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return train(model, device), [parameter.detach() for parameter in model.parameters()]

    assert_same(*on_both(script), rtol=1e-4)
