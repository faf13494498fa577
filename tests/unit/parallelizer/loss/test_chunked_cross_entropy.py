"""Cross-entropy in chunks: the loss, its gradient and the gradient of that, as PyTorch's; which logits it takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moreh_ap.parallelizer.loss import chunked_cross_entropy
from moreh_ap.parallelizer.loss.loss_precision import Float32Losses
from moreh_ap.patching import Patches
from moreh_ap.planner.cost.training_systems import MOREH_AP, MOREH_AP_ON_CPU

ROWS, CLASSES = 50, 40
ORIGINAL = torch._C._nn.cross_entropy_loss
CROSS_ENTROPY = F.cross_entropy


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logits of this size are many, and a chunk has seven rows of them."""
    monkeypatch.setattr(chunked_cross_entropy, "LEAST_ELEMENTS", {"cpu": ROWS * CLASSES})
    monkeypatch.setattr(chunked_cross_entropy, "LEAST_CLASSES", CLASSES)
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK_ELEMENTS", {"cpu": 7 * CLASSES})
    patches = Patches()
    chunked_cross_entropy.install(patches)
    chunked_cross_entropy.use_for(nn.Embedding(CLASSES, 2))
    yield
    patches.undo()
    assert torch._C._nn.cross_entropy_loss is ORIGINAL


class Float32Seen(TorchDispatchMode):
    """The largest result in float32, in elements; of those with so many classes in the last dim, if they are given."""

    def __init__(self, classes: int | None = None) -> None:
        super().__init__()
        self.classes, self.most = classes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            is_float32 = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
            if is_float32 and self.classes in (None, *leaf.shape[-1:]):
                self.most = max(self.most, leaf.numel())
        return result


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    target = torch.randint(0, CLASSES, (ROWS,))
    target[::6] = -100
    return (3 * torch.randn(ROWS, CLASSES)).to(dtype).requires_grad_(), target


def results(reduction: str, smoothing: float) -> list[torch.Tensor]:
    logits, target = batch()
    loss = F.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(loss.sum() * 2, logits, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), logits)
    (alone,) = torch.autograd.grad(F.cross_entropy(logits, target, reduction=reduction).sum(), logits)
    return [loss.detach(), gradient.detach(), second, alone]


EXPECTED = {case: results(*case) for case in product(("mean", "sum", "none"), (0.0, 0.1))}


@pytest.mark.parametrize("reduction, smoothing", EXPECTED)
def test_losses_and_two_gradients_are_those_of_pytorch(many, reduction, smoothing):
    for ours, expected in zip(results(reduction, smoothing), EXPECTED[reduction, smoothing], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("under_autocast", [False, True])
def test_no_float32_copy_of_low_precision_logits_is_made(many, under_autocast):
    logits, target = batch(torch.bfloat16)
    with torch.autocast("cpu", enabled=under_autocast), Float32Seen() as seen:
        loss = F.cross_entropy(logits, target)
        loss.backward()
    assert seen.most <= 7 * CLASSES
    assert loss.dtype == (torch.float32 if under_autocast else torch.bfloat16)
    exact, _ = batch(torch.bfloat16)
    expected = F.cross_entropy(exact.float().double(), target)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6 if under_autocast else 1e-2)
    torch.testing.assert_close(logits.grad, exact.grad, rtol=1e-2, atol=1e-5)


def test_losses_of_transformers_are_float32_without_such_a_copy(many):
    from transformers.loss import loss_utils

    logits, target = batch(torch.bfloat16)
    loss_of = loss_utils.LOSS_MAPPING["ForCausalLM"]
    with Float32Seen() as seen:
        loss = loss_of(logits.view(1, ROWS, CLASSES), target.view(1, ROWS), CLASSES)
        loss.backward()
    assert seen.most <= 7 * CLASSES and loss.dtype == torch.float32
    exact, _ = batch(torch.bfloat16)
    expected = loss_utils.ForCausalLMLoss(exact.view(1, ROWS, CLASSES), target.view(1, ROWS), CLASSES)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def of_next_words(logits, target):
    scores, wanted = logits.view(5, -1, CLASSES)[:, :-1], target.view(5, -1)[:, 1:]
    return F.cross_entropy(scores.reshape(-1, CLASSES), wanted.flatten())


def soft_capped(logits, target):
    return F.cross_entropy(5 * torch.tanh(logits / 5), target, label_smoothing=0.1)


def masked(logits, target):
    each = F.cross_entropy(logits / 2, target, reduction="none")
    return (each * (target > 7)).sum() / (target > 7).sum()


@pytest.mark.parametrize("loss_of", [of_next_words, soft_capped, masked])
def test_losses_in_a_forward_in_bfloat16(many, monkeypatch, loss_of):
    """Under a plan in bfloat16: of what the forward computes in bfloat16, without a float32 copy of all."""
    monkeypatch.setattr(chunked_cross_entropy, "LEAST_ELEMENTS", {"cpu": ROWS * CLASSES // 2})
    logits, target = batch(torch.bfloat16)
    with Float32Seen() as seen, Float32Losses():
        loss = loss_of(logits, target)
        loss.backward()
    assert seen.most <= 7 * CLASSES and loss.dtype == torch.float32
    exact, _ = batch(torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(F, "cross_entropy", lambda scores, *rest, **more: CROSS_ENTROPY(scores.double(), *rest, **more))
        expected = loss_of(exact, target)
        expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    largest = float(exact.grad.abs().max())
    torch.testing.assert_close(logits.grad, exact.grad, rtol=2e-2, atol=1e-3 * largest)


def test_a_model_that_caps_its_logits(many, monkeypatch):
    """Gemma 2, as a worker runs it under a plan in bfloat16."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "final_logit_softcapping": 5.0}
    config = Gemma2Config(vocab_size=CLASSES, pad_token_id=0, use_cache=False, **sizes, **heads)
    model = Gemma2ForCausalLM(config).to(torch.bfloat16)
    ids = torch.randint(0, CLASSES, (1, 2 * ROWS))
    with Float32Seen(CLASSES) as seen, Float32Losses():
        result = model(input_ids=ids, labels=ids)
        result.loss.backward()
    assert 0 < seen.most <= 7 * CLASSES
    monkeypatch.setattr(chunked_cross_entropy, "LEAST_ELEMENTS", {})
    assert result.loss.item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-6)


def test_what_is_no_row_of_logits_with_a_class_each_is_left_to_pytorch(many, monkeypatch):
    def never(*_args):
        raise AssertionError("taken in chunks")

    monkeypatch.setattr(chunked_cross_entropy, "chunked_cross_entropy", never)
    logits, target = batch()
    few = F.cross_entropy(logits[:2], target[:2])
    weighted = F.cross_entropy(logits, target, weight=torch.ones(CLASSES))
    probabilities = F.cross_entropy(logits, logits.detach().softmax(-1))
    planes = F.cross_entropy(logits[None].transpose(1, 2), target[None])
    wide = F.cross_entropy(logits.double(), target)
    assert all(one.isfinite() for one in (few, weighted, probabilities, planes, wide))
    with pytest.raises(AssertionError, match="in chunks"):
        F.cross_entropy(logits, target)


def test_a_target_that_is_no_class_is_the_error_of_pytorch(many):
    logits, target = batch()
    target[3] = CLASSES
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        F.cross_entropy(logits, target)
    assert F.cross_entropy(logits, torch.full((ROWS,), -100)).isnan(), "no row counts"


def test_a_model_without_a_vocabulary_changes_nothing():
    patches = Patches()
    chunked_cross_entropy.install(patches)
    chunked_cross_entropy.use_for(nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 1000)))
    assert torch._C._nn.cross_entropy_loss is ORIGINAL and not list(patches)
    patches.undo()


class Kernels:
    """What `cross_entropy_kernels` has, by PyTorch's operations; counts the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def row_losses(self, logits, target, smoothing):
        self.calls.append("row_losses")
        totals = logits.float().logsumexp(-1)
        return totals - (self._wanted(logits, target, smoothing) * logits).sum(-1), totals

    def gradient(self, logits, target, totals, grad, smoothing):
        self.calls.append("gradient")
        difference = (logits.float() - totals[:, None]).exp() - self._wanted(logits, target, smoothing)
        return (difference * grad[:, None]).to(logits.dtype)

    def _wanted(self, logits, target, smoothing):
        return F.one_hot(target, logits.shape[1]) * (1 - smoothing) + smoothing / logits.shape[1]


@pytest.mark.parametrize("reduction, smoothing", EXPECTED)
def test_kernels_compute_what_chunks_would(many, monkeypatch, reduction, smoothing):
    """The kernels themselves are in `tests/frameworks/test_kernels.py`, and on a GPU in `tests/gpu`."""
    kernels = Kernels()
    monkeypatch.setattr(chunked_cross_entropy, "_kernels", lambda device_type: kernels)
    for ours, expected in zip(results(reduction, smoothing), EXPECTED[reduction, smoothing], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert kernels.calls == ["row_losses", "row_losses", "gradient"], "the first gradient has one of its own"


def test_kernels_that_do_not_run_here_leave_chunks_and_say_so(monkeypatch, capsys):
    """As where Triton has no compiler: here CUDA is not there at all."""
    monkeypatch.setitem(sys.modules, "moreh_ap.parallelizer.loss.cross_entropy_kernels", Kernels())
    chunked_cross_entropy._kernels.cache_clear()
    assert chunked_cross_entropy._kernels("cpu") is None and not capsys.readouterr().out
    assert chunked_cross_entropy._kernels("cuda") is None
    said = capsys.readouterr().out
    assert said.startswith("[info] losses over a vocabulary are computed in chunks of rows, as Triton does not run")
    assert chunked_cross_entropy._kernels("cuda") is None and not capsys.readouterr().out, "once"
    chunked_cross_entropy._kernels.cache_clear()


def test_the_planner_knows_from_where_on():
    known = {"cpu": MOREH_AP_ON_CPU.chunked_logits, "cuda": MOREH_AP.chunked_logits}
    assert known == chunked_cross_entropy.LEAST_ELEMENTS
    assert MOREH_AP.chunked_classes == chunked_cross_entropy.LEAST_CLASSES
