"""Autocast for "cuda" outside of models."""

from __future__ import annotations

import torch


def test_autocast_for_cuda_holds_outside_of_models_too(monkeypatch):
    for name in ("is_available", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    x, weight = torch.randn(4, 8, device="cuda"), torch.randn(3, 8, device="cuda", requires_grad=True)
    y = torch.tensor([0, 1, 2, 0], device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scores = torch.nn.functional.linear(x, weight)
        assert scores.dtype == (x @ weight.T).dtype == torch.bfloat16
        assert scores.softmax(-1).dtype == scores.sum().dtype == torch.float32, "CUDA raises what loses accuracy"
        loss = torch.nn.functional.cross_entropy(scores, y)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32, "tensors of the CPU are not meant"
        with torch.autocast("cuda", enabled=False):
            assert (x @ weight.T).dtype == torch.float32
    assert loss.dtype == torch.float32 and (x @ weight.T).dtype == torch.float32
    loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.nn.functional.linear(x.cpu(), weight.detach().cpu())
    assert torch.equal(scores.detach().cpu(), expected)
    assert weight.grad.dtype == torch.float32 and weight.grad.abs().sum() > 0
