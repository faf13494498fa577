"""Losses that a script computes from a model's output: those of one process, and, where they can, without moving it.

The model's output is large (288 KB), so that it stays on the workers. `MOVED` are the forms of which parts travel.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from one_line_models import OwnTransformer, ragged_batches, tiny_llama
from test_one_line_training import batches
from torch import nn

from moreh_ap.protocol.messages.calls import ReleaseCalls
from moreh_ap.session.traffic import SlowPathWarning, Traffic

pytestmark = pytest.mark.rotating  # one more loss each

CLASSES, POSITIONS, ROWS, WIDTH = 500, 24, 6, 16


class Scorer(nn.Module):
    """Scores of every class at every position."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        return self.head(self.embedding(ids).tanh())


def shifted(scores, teacher, labels, mask):
    return F.cross_entropy(scores[..., :-1, :].contiguous().view(-1, CLASSES), labels[..., 1:].contiguous().view(-1))


def log_probabilities(scores, teacher, labels, mask):
    chosen = F.log_softmax(scores[:, :-1], -1).gather(-1, labels[:, 1:, None]).squeeze(-1)
    return -(chosen * mask[:, 1:]).sum(1).mean()


def distilled(scores, teacher, labels, mask):
    soft = F.kl_div(F.log_softmax(scores / 2, -1), F.softmax(teacher / 2, -1), reduction="batchmean") * 4
    return soft + F.cross_entropy(scores.view(-1, CLASSES), labels.view(-1))


def weighted_by_row(scores, teacher, labels, mask):
    each = F.cross_entropy(scores.view(-1, CLASSES), labels.view(-1), reduction="none").view(labels.shape)
    return (each * mask).sum() / mask.sum() + ((1 - torch.exp(-each)) ** 2 * each).mean()


def of_differences(scores, teacher, labels, mask):
    return F.mse_loss(scores, teacher) + (scores - teacher).abs().mean() + F.smooth_l1_loss(scores, teacher)


def with_entropy(scores, teacher, labels, mask):
    probabilities = scores.softmax(-1)
    entropy = -(probabilities * probabilities.clamp_min(1e-9).log()).sum(-1).mean()
    return entropy + scores.logsumexp(-1).pow(2).mean()


def with_accuracy(scores, teacher, labels, mask):
    right = (scores.argmax(-1) == labels).float().mean()
    return scores.pow(2).mean() + right + (scores.topk(5, -1).indices == labels[..., None]).any(-1).sum()


def changed_in_place(scores, teacher, labels, mask):
    scores = scores / 2
    scores.masked_fill_(torch.arange(CLASSES, device=scores.device) > 490, -1e4)
    rows = scores.view(-1, CLASSES)
    scores.div_(1.5)
    return F.nll_loss(F.log_softmax(rows, -1), labels.clamp(max=400).view(-1))


def in_two_halves(scores, teacher, labels, mask):
    left, right = scores.chunk(2, -1)
    together = torch.cat([left, right], -1).std(-1).mean() + torch.stack([left, right], 1).amax((1, 2, 3)).sum()
    return (left * right).sum(-1).mean() + together


STAY = {
    "cross entropy": lambda s, t, y, m: F.cross_entropy(s.view(-1, CLASSES), y.view(-1), ignore_index=3),
    "classes second": lambda s, t, y, m: F.cross_entropy(s.transpose(1, 2), y),
    "smoothed": lambda s, t, y, m: F.cross_entropy(s.flatten(0, 1), y.flatten(), ignore_index=3, label_smoothing=0.1),
    "weighted classes": lambda s, t, y, m: F.cross_entropy(
        s.flatten(0, 1), y.flatten(), weight=torch.linspace(0.5, 1.5, CLASSES, device=s.device), label_smoothing=0.1
    ),
    "a sum": lambda s, t, y, m: F.cross_entropy(s.view(-1, CLASSES), y.view(-1), reduction="sum") / 7,
    "the last position": lambda s, t, y, m: F.cross_entropy(s[:, -1, :], y[:, -1]),
    "two classes": lambda s, t, y, m: F.binary_cross_entropy_with_logits(s, F.one_hot(y, CLASSES).float()),
    "in float64": lambda s, t, y, m: F.cross_entropy(s.double().view(-1, CLASSES), y.view(-1)).float(),
    **{f.__name__: f for f in (shifted, log_probabilities, distilled, weighted_by_row, of_differences, with_entropy)},
    **{f.__name__: f for f in (with_accuracy, changed_in_place, in_two_halves)},
}


def changed_output(scores, teacher, labels, mask):
    rows = scores.view(-1, CLASSES)
    scores.mul_(2.0)
    return F.cross_entropy(rows, labels.view(-1)) + scores.mean()


def of_chosen_rows(scores, teacher, labels, mask):
    return F.cross_entropy(scores[labels != 3], labels[labels != 3])


def across_the_batch(scores, teacher, labels, mask):
    features = F.normalize(scores.mean(1), dim=-1)
    contrast = F.cross_entropy(features @ features.T, torch.arange(len(labels), device=labels.device))
    return contrast + scores.mean(0).std()


MOVED = {f.__name__: f for f in (changed_output, of_chosen_rows, across_the_batch)}


def train(loss_of, device, rows=ROWS):
    torch.manual_seed(0)
    model, teacher = Scorer().to(device), Scorer().to(device).requires_grad_(False)
    ids, labels = torch.randint(0, CLASSES, (2, rows, POSITIONS)).to(device)
    mask = (labels != 3).float()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(3):
        loss = loss_of(model(ids), teacher(ids), labels, mask)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def moved_bytes(monkeypatch):
    """Grows by the bytes of large tensors that went through the controller."""
    moved = []
    monkeypatch.setattr(Traffic, "moved", lambda self, num_bytes: moved.append(num_bytes))
    return moved


@pytest.mark.parametrize(
    "name, plan",
    [
        *((name, "replicate=2") for name in [*STAY, *MOVED]),
        *((name, "shard=2,micro_batches=3") for name in ("distilled", "weighted_by_row", "changed_output")),
    ],
)
def test_a_loss_of_the_script_s_own(accelerator, moved_bytes, name, plan):
    expected = train({**STAY, **MOVED}[name], "cpu")
    accelerator(plan)
    assert train({**STAY, **MOVED}[name], "cuda") == pytest.approx(expected, rel=1e-5)
    limit = 16 * 1024 if name in STAY else ROWS * POSITIONS * CLASSES * 4 * 12
    assert sum(moved_bytes) < limit


@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2,micro_batches=2", "shard=2,tensor=2"])
def test_a_loss_of_the_script_s_own_from_a_model_in_parts(accelerator, moved_bytes, plan):
    def script(device):
        torch.manual_seed(0)
        model = tiny_llama().to(device)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        for batch in ragged_batches(3, 8, length=32):
            ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
            logits = model(input_ids=ids).logits[:, :-1]
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = script("cpu")
    accelerator(plan)
    assert script("cuda") == pytest.approx(expected, rel=1e-5)
    assert sum(moved_bytes) < 16 * 1024


def test_rows_that_do_not_divide_and_a_batch_that_is_whole_everywhere(accelerator, moved_bytes):
    for rows in (5, 1):
        expected = train(distilled, "cpu", rows)
        accelerator("replicate=2")
        assert train(distilled, "cuda", rows) == pytest.approx(expected, rel=1e-5)
    assert sum(moved_bytes) < 16 * 1024


def test_a_value_is_read_after_it_was_used_on_the_workers(accelerator):
    results: list[list[torch.Tensor]] = []
    for device in ("cpu", "cuda"):
        accelerator("replicate=2")
        torch.manual_seed(0)
        model, ids = Scorer().to(device), torch.arange(ROWS * POSITIONS).view(ROWS, POSITIONS).to(device)
        with torch.no_grad():
            scores = model(ids)
            halved = scores / 2
            view = halved[:, 3]
            first = view.cpu().clone()
            halved.add_(1)
            view.mul_(3)
            results.append([first, view.cpu(), halved.cpu(), halved.sum((0, 1)).cpu(), scores.cpu(), view.max().cpu()])
    for ours, expected in zip(*results[::-1]):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("plan", ["shard=2,precision=bf16", "shard=2,micro_batches=3,precision=bf16"])
@pytest.mark.parametrize("name", ["shifted", "distilled", "changed_in_place", "changed_output", "the last position"])
def test_logits_in_bfloat16_are_float32_to_the_script(accelerator, name, plan):
    """The workers hold what was computed; a loss of it is that of its values in float32."""
    accelerator(plan)
    torch.manual_seed(0)
    model, teacher = Scorer().cuda(), torch.randn(ROWS, POSITIONS, CLASSES).cuda()
    ids, labels = torch.randint(0, CLASSES, (2, ROWS, POSITIONS)).cuda()
    mask = (labels != 3).float()
    scores = model(ids)
    assert scores.dtype == torch.float32
    read = model(ids).detach().cpu()
    assert read.dtype == torch.float32 and torch.equal(read, read.bfloat16().float())
    read.requires_grad_()
    loss_of = {**STAY, **MOVED}[name]
    loss = loss_of(scores, teacher, labels, mask)
    expected = loss_of(read + 0, teacher.cpu(), labels.cpu(), mask.cpu())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    (gradient,) = torch.autograd.grad(expected, read)
    largest = float(gradient.sum((0, 1)).abs().max())
    torch.testing.assert_close(model.head.bias.grad.cpu(), gradient.sum((0, 1)), rtol=0.03, atol=0.01 * largest)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "tensor=2"])
def test_kept_losses_keep_no_logits_on_the_workers(accelerator, plan):
    session = accelerator(plan)
    released = []
    session.outbox.on_sent = lambda commands, posted: released.extend(
        number for command in commands if isinstance(command, ReleaseCalls) for number in command.call_ids
    )

    def script(device, reads):
        torch.manual_seed(0)
        model = OwnTransformer().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        kept = []
        for ids, labels in batches(device, count=6):
            loss = model(ids, labels)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss.item() if reads else loss.detach())
        return kept

    try:
        losses = script("cuda", reads=False)
        assert len(released) >= 4, "each call but the last, which the script can still use"
    finally:
        session.outbox.on_sent = None
    expected = script("cpu", reads=True)
    assert [float(loss) for loss in losses] == pytest.approx(expected, rel=1e-5)


def test_a_wrong_label_raises_what_pytorch_raises(accelerator):
    accelerator("replicate=2")
    scores, labels = Scorer().cuda()(torch.zeros(4, 20, dtype=torch.long).cuda()), torch.full((80,), CLASSES).cuda()
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(scores.view(-1, CLASSES), labels).item()
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(scores.view(-1, CLASSES), labels[:7])


def test_many_bytes_through_the_script_are_said_once_with_its_line(accelerator, monkeypatch):
    accelerator("replicate=2")
    monkeypatch.setattr("moreh_ap.session.traffic._MANY_BYTES", 1 << 20)
    model = Scorer().cuda()
    ids = torch.zeros(ROWS, POSITIONS, dtype=torch.long).cuda()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            model(ids).sort(0)[0].sum().backward()
    found = [warning for warning in caught if warning.category is SlowPathWarning]
    assert len(found) == 1 and found[0].filename == __file__
    assert "MB of tensors went through this process in one step" in str(found[0].message)
