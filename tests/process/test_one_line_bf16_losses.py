"""Losses under plans that compute in bfloat16: those of one process that computes the same in bfloat16, and its losses
in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

CLASSES, WIDTH, ROWS, POSITIONS = 512, 16, 6, 11

pytestmark = pytest.mark.rotating  # one more plan each


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.inner(self.norm(hidden)).tanh()


class Learner(nn.Module):
    """Computes one of several losses, given labels, in the precision that `raised` gives what it is computed from."""

    def __init__(self, raised=None):
        super().__init__()
        self.words, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.raised = raised

    def forward(self, ids, labels=None, kind="logits"):
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = block(hidden)
        if kind == "hidden":
            return hidden
        logits = self.head(hidden)
        if kind == "logits":
            return logits
        if self.raised:
            hidden, logits = self.raised(hidden), self.raised(logits)
        if kind == "cross-entropy":
            return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), ignore_index=7)
        if kind == "log-probabilities":
            return F.nll_loss(F.log_softmax(logits.view(-1, CLASSES), -1), labels.view(-1))
        return nn.MSELoss()(hidden, torch.full_like(hidden, 0.5)) + F.huber_loss(hidden, torch.zeros_like(hidden))


def losses_in_forward(call):
    for kind in ("cross-entropy", "log-probabilities", "differences"):
        yield kind, lambda ids, labels, kind=kind: call(ids, labels, kind)


def losses_outside(call):
    yield "logits", lambda ids, labels: F.cross_entropy(call(ids).view(-1, CLASSES), labels.view(-1))
    targets = torch.linspace(0, 1, WIDTH).expand(ROWS, POSITIONS, WIDTH)
    yield "hidden", lambda ids, labels: nn.MSELoss()(call(ids, None, "hidden"), targets.to(ids.device))


def trained(model, call, device):
    """Returns every loss, and the gradient of the embedding that it gives."""
    torch.manual_seed(1)
    ids, labels = torch.randint(0, CLASSES, (2, ROWS, POSITIONS)).to(device)
    found = {}
    for kind, loss_of in (*losses_in_forward(call), *losses_outside(call)):
        loss = loss_of(ids, labels)
        loss.backward()
        assert loss.dtype == torch.float32
        found[kind] = loss.item(), model.words.weight.grad.detach().cpu().clone()
        model.zero_grad()
    return found


def in_one_process():
    """Weights converted to bfloat16 for every call, losses and results in float32."""
    torch.manual_seed(0)
    model = Learner(raised=as_float32)

    def call(*args):
        low = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, low, args).float()

    return trained(model, call, "cpu")


def as_float32(tensor):
    return tensor.float()


@pytest.mark.parametrize(
    "plan",
    [
        "replicate=1,precision=bf16",
        "replicate=2,precision=bf16",
        "shard=2,micro_batches=2,recompute=full,precision=bf16",
        "tensor=2,precision=bf16",
        "pipeline=2,micro_batches=2,precision=bf16",
    ],
)
def test_losses_are_float32_in_the_forward_and_outside(accelerator, plan):
    wanted = in_one_process()
    accelerator(plan)
    torch.manual_seed(0)
    model = Learner().cuda()
    found = trained(model, model, "cuda")
    for kind, (loss, gradient) in wanted.items():
        assert found[kind][0] == pytest.approx(loss, rel=3e-5), kind
        assert loss != torch.tensor(loss).bfloat16().item(), "what bfloat16 would leave of it is another number"
        largest = float(gradient.abs().max())
        torch.testing.assert_close(found[kind][1], gradient, rtol=0.05, atol=0.02 * largest)
