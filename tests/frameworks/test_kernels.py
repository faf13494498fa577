"""Triton kernels without a GPU: interpreted, they give what PyTorch gives in float64; and they compile for GPUs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from moreh_ap.parallelizer.loss import chunked_cross_entropy
from moreh_ap.patching import Patches

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="of the group kernels")

ROWS, CLASSES = 6, 12289  # three whole blocks and a class
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moreh_ap.parallelizer.loss import cross_entropy_kernels as kernels

for dtype in ("bf16", "fp16", "fp32"):
    numbers = {"num_classes": "i32", "row_stride": "i32", "smoothing": "fp32", "BLOCK": "constexpr"}
    read = {"logits": f"*{dtype}", "target": "*i64"}
    signatures = {
        kernels._forward: {**read, "losses": "*fp32", "totals": "*fp32", **numbers},
        kernels._backward: {**read, "totals": "*fp32", "grad": "*fp32", "result": f"*{dtype}", **numbers},
    }
    for kernel, signature in signatures.items():
        source = ASTSource(fn=kernel, signature=signature, constexprs={"BLOCK": kernels._BLOCK})
        for capability in (80, 90, 100):
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
            assert compiled.asm["cubin"]
            print(kernel.__name__, dtype, capability)
"""


@pytest.fixture
def interpreted(monkeypatch):
    """Losses over many logits come to the kernels, which Triton interprets on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when a kernel is defined
    kernels = importlib.import_module("moreh_ap.parallelizer.loss.cross_entropy_kernels")
    monkeypatch.setattr(chunked_cross_entropy, "_kernels", lambda device_type: kernels)
    patches = Patches()
    chunked_cross_entropy.install(patches)
    chunked_cross_entropy.use_for(torch.nn.Embedding(CLASSES, 2))
    monkeypatch.setattr(chunked_cross_entropy, "LEAST_ELEMENTS", {"cpu": ROWS * CLASSES})
    yield kernels
    patches.undo()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_losses_and_gradients_are_those_of_float64(interpreted, dtype, smoothing):
    torch.manual_seed(0)
    logits = (3 * torch.randn(ROWS, CLASSES)).to(dtype)
    if not smoothing:
        logits[1, :5000] = -torch.inf  # a block and more of classes that are masked
    target = torch.randint(5000, CLASSES, (ROWS,))
    target[2] = -100
    results = []
    for scores in (logits.clone().requires_grad_(), logits.double().requires_grad_()):
        with torch.autocast("cpu", torch.bfloat16, enabled=scores.dtype != torch.float64):
            loss = F.cross_entropy(scores, target, label_smoothing=smoothing)
        loss.backward()
        results.append((loss.detach().double(), scores.grad.double()))
    (loss, grad), (expected_loss, expected_grad) = results
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert (grad - expected_grad).abs().max() <= ROUNDING[dtype] * expected_grad.abs().max()


def test_rows_that_are_not_in_one_piece(interpreted):
    torch.manual_seed(0)
    logits, target = torch.randn(ROWS, 2 * CLASSES)[:, ::2], torch.arange(ROWS)
    losses, totals = interpreted.row_losses(logits, target, 0.0)
    torch.testing.assert_close(losses, F.cross_entropy(logits, target, reduction="none"))
    torch.testing.assert_close(totals, logits.logsumexp(1))
    assert [one.shape for one in interpreted.row_losses(logits[:0], target[:0], 0.0)] == [(0,), (0,)]


def test_they_compile_for_gpus(tmp_path):
    """No GPU is needed: Triton brings its assembler."""
    script = tmp_path / "compile_kernels.py"  # Triton reads the source of what it compiles
    script.write_text(COMPILE)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 18
