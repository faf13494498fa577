"""Losses that a script computes from logits: on a worker, those of PyTorch, without whole float32 copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from moreh_ap.parallelizer.loss import chunked_cross_entropy, later_operations, later_values
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.protocol.messages.row_shards import RunOnRowShards
from moreh_ap.protocol.messages.tensors import OutputRef, RowShardRef, TensorData
from moreh_ap.runtime.worker.row_shard_store import RowShard, convert_memory_of, run_on_row_shards

ROWS, POSITIONS, CLASSES = 4, 13, 40
CHUNK = 7 * CLASSES
LOGITS = OutputRef(0, 0)


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of this size are many, and a chunk has seven rows of them."""
    for module in (chunked_cross_entropy, later_operations):
        monkeypatch.setattr(module, "LEAST_ELEMENTS", {"cpu": CHUNK})
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK_ELEMENTS", {"cpu": CHUNK})
    monkeypatch.setattr(later_operations, "LEAST_CLASSES", CLASSES)


class Worker(TorchDispatchMode):
    """Sends the operations of a script over logits to one worker's store, as the session does, and keeps count there.

    Attributes:
        most: The largest float32 result that the worker made beside views, in elements.
    """

    def __init__(self, logits: torch.Tensor, promised: torch.dtype) -> None:
        super().__init__()
        self.output = RowShard(logits.detach(), Axis(0, 1, None), ROWS, True, promised)
        self.logits = torch.empty(logits.shape, dtype=promised, requires_grad=True)
        self.refs: dict[int, Any] = {id(self.logits): LOGITS}
        self.shards: dict[int, RowShard] = {}
        self.alive: list[Any] = []
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs or {}))
        if not any(id(leaf) in self.refs for leaf in leaves) or func in (torch.ops.aten.detach.default,):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.detach.default and id(args[0]) in self.refs:
                self.refs[id(result)] = self.refs[id(args[0])]
                self.alive.append(result)
            return result
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        numbers = tuple(range(len(self.shards), len(self.shards) + len(outputs)))
        sent = tree_map(self._sent, (tuple(args), dict(kwargs or {})))
        for name in ("device", "pin_memory", "layout"):
            sent[1].pop(name, None)
        views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
        sent_func = torch.ops.aten.reshape.default if func in views else func
        name = f"{sent_func._schema.name}.{sent_func._overloadname}"
        mutable = func._schema.is_mutable
        command = RunOnRowShards(name, *sent, () if mutable else numbers, sums=False)
        with Float32Made() as made:
            shards = run_on_row_shards(command, self._find, lambda data: data.tensor(), self._convert)
        self.most = max(self.most, made.most)
        if not mutable:
            self.shards.update(zip(numbers, shards, strict=True))
            self.refs.update((id(one), RowShardRef(number)) for one, number in zip(outputs, numbers, strict=True))
            self.alive += outputs
        return result

    def _sent(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return self.refs[id(leaf)] if id(leaf) in self.refs else TensorData.of(leaf)

    def _find(self, ref: Any) -> RowShard:
        return self.output if isinstance(ref, OutputRef) else self.shards[ref.number]

    def _convert(self, shard: RowShard) -> None:
        convert_memory_of(shard, self.shards.values())

    def shard(self, tensor: torch.Tensor) -> RowShard:
        return self._find(self.refs[id(tensor)])


class Float32Made(TorchDispatchMode):
    """The largest float32 result with memory of its own, in elements."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 and leaf.device.type != "meta":
                    self.most = max(self.most, leaf.numel())
        return result


def whole(logits, labels):
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), ignore_index=3)


def shifted(logits, labels):
    return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES).float(), labels[:, 1:].reshape(-1), ignore_index=3)


def float_first(logits, labels):
    scores = logits.float()
    return F.cross_entropy(scores[:, 1:].contiguous().view(-1, CLASSES), labels[:, 1:].reshape(-1), reduction="sum")


def weighted_rows(logits, labels):
    classes = torch.linspace(0.5, 2.0, CLASSES)
    each = F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1), weight=classes, reduction="none")
    return (each * torch.arange(len(each))).mean()


def smoothed(logits, labels):
    return F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1), label_smoothing=0.2, ignore_index=3)


def smoothed_sum(logits, labels):
    smoothing = {"label_smoothing": 0.1, "reduction": "sum"}
    return F.cross_entropy(logits[:, :-1].float().reshape(-1, CLASSES), labels[:, 1:].reshape(-1), **smoothing)


def with_temperature(logits, labels):
    scores = logits.float() / 1.7
    return F.cross_entropy(scores[:, :-1].contiguous().view(-1, CLASSES), labels[:, 1:].reshape(-1), ignore_index=3)


def soft_capped(logits, labels):
    scores = 5 * torch.tanh(logits.float() / 5)
    return F.cross_entropy(scores[..., 1:, :].reshape(-1, CLASSES), labels[..., :-1].reshape(-1))


def masked(logits, labels):
    mask = (labels != 3).float()
    each = F.cross_entropy((logits.float() * 0.5).view(-1, CLASSES), labels.view(-1), reduction="none")
    return (each.view(labels.shape) * mask).sum() / mask.sum()


def with_z_loss(logits, labels):
    scores = logits.float().view(-1, CLASSES)
    return F.cross_entropy(scores, labels.view(-1)) + 1e-2 * scores.logsumexp(-1).pow(2).mean()


def picked(logits, labels):
    scores = F.log_softmax(logits.float()[:, :-1], -1)
    return -scores.gather(-1, labels[:, 1:, None]).squeeze(-1).mean()


def single_positions(logits, labels):
    return F.cross_entropy(logits.float()[:, 2] * 2, labels[:, 2]) + F.cross_entropy(logits.float()[:, 5], labels[:, 5])


def with_entropy(logits, labels):
    scores = F.log_softmax(logits.float().view(-1, CLASSES), -1)
    return F.nll_loss(scores, labels.view(-1)) - (scores.exp() * scores).sum(-1).mean()


SINGLE = {f.__name__: f for f in (whole, shifted, float_first, weighted_rows)}
SEVERAL = (smoothed, smoothed_sum, with_temperature, soft_capped, masked, with_z_loss, picked, with_entropy)
SUMS = {f.__name__: f for f in SEVERAL}  # of gradients, which PyTorch adds in another order
LOSSES = SINGLE | SUMS


def values(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (3 * torch.randn(ROWS, POSITIONS, CLASSES)).to(dtype), torch.randint(0, CLASSES, (ROWS, POSITIONS))


def on_the_worker(loss_of, held, promised, labels):
    """Returns the loss, the gradient of the output as it is held for its backward and in full, and the count."""
    with Worker(held, promised) as worker:
        loss = loss_of(worker.logits, labels)
        (gradient,) = torch.autograd.grad(loss, worker.logits)
    shard = worker.shard(gradient)
    return worker.shard(loss).tensor, shard.held, shard.tensor, worker.most


def expected(loss_of, held, promised, labels):
    logits = held.to(promised).requires_grad_()
    loss = loss_of(logits, labels)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("held, promised", [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
])  # fmt: skip
def test_losses_and_gradients_are_those_of_pytorch_without_float32_copies(name, held, promised):
    scores, labels = values(held)
    loss, kept, gradient, most = on_the_worker(LOSSES[name], scores, promised, labels)
    wanted_loss, wanted = expected(LOSSES[name], scores, promised, labels)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-6, atol=0)
    assert kept.dtype == held and torch.equal(kept, gradient.to(held))
    if name in SINGLE:
        assert torch.equal(gradient, wanted)
    elif promised == torch.bfloat16:  # in which PyTorch adds the gradients of several float32 copies
        torch.testing.assert_close(gradient, wanted, rtol=2**-7, atol=2e-4)
    else:
        torch.testing.assert_close(gradient, wanted, rtol=2e-6, atol=1e-8)
    if held == torch.bfloat16:
        assert most <= CHUNK


def test_without_chunks_there_are_float32_copies(monkeypatch):
    scores, labels = values(torch.bfloat16)
    monkeypatch.setattr(later_operations, "LEAST_CLASSES", CLASSES + 1)
    *_, most = on_the_worker(whole, scores, torch.float32, labels)
    assert most == scores.numel()


@pytest.mark.parametrize("needs_all", [True, False])
def test_what_needs_all_values_gets_them_and_what_needs_single_positions(needs_all):
    form = over_positions if needs_all else single_positions
    scores, labels = values(torch.bfloat16)
    loss, _, gradient, most = on_the_worker(form, scores, torch.float32, labels)
    wanted_loss, wanted = expected(form, scores, torch.float32, labels)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8)
    assert most == scores.numel() or not needs_all


def over_positions(logits, labels):
    return (logits.float() * 2).softmax(1).pow(2).mean()


@pytest.mark.parametrize(
    "order",
    ["the logits", "a float32 copy", "the log-probabilities", "a view", "scaled", "a view of scaled", "nothing"],
)
def test_values_that_are_changed_in_place_change_nothing_else(order):
    def script(logits, labels):
        with torch.no_grad():
            base = logits * 2
            first, second = base.float(), base.float()
            scores = F.log_softmax(first.view(-1, CLASSES), -1)
            view = scores[3:9]
            scaled = first / 2
            part = scaled[:, 1:]
            row_sums = part.sum(-1)
            targets = {"the logits": base, "a float32 copy": second, "scaled": scaled, "a view of scaled": part}
            targets |= {"the log-probabilities": scores, "a view": view, "nothing": row_sums}
            targets[order].mul_(1.5)
            return [base, first, second, scores, view, scaled, part, row_sums, part.exp()]

    held, labels = values(torch.bfloat16)
    with Worker(held, torch.bfloat16) as worker:
        found = script(worker.logits, labels)
    for ours, wanted in zip(found, script(held, labels), strict=True):
        assert torch.equal(worker.shard(ours).tensor, wanted)
    if order == "nothing":
        assert worker.most <= CHUNK


def test_rows_that_were_cut_off_are_zeros_and_nothing_waits_for_numbers():
    """On fake tensors, which have no numbers: whatever needs one raises."""
    aten = torch.ops.aten

    def cut_and_put_back(scores):
        part = later_operations.run_on_later_values(aten.slice.Tensor, (scores, 1, 2, 9), {})
        arguments = (part, [ROWS, POSITIONS, CLASSES], 1, 2, 9, 1)
        return later_operations.run_on_later_values(aten.slice_backward.default, arguments, {})

    scores, _ = values(torch.bfloat16)
    found = cut_and_put_back(later_operations.held(scores, torch.float32))
    wanted = torch.zeros(scores.shape)
    wanted[:, 2:9] = scores[:, 2:9].float()
    assert isinstance(found, later_values.InRows) and torch.equal(found.values(torch.float32), wanted)
    with FakeTensorMode() as mode:
        fake = cut_and_put_back(later_operations.held(mode.from_tensor(scores), torch.float32))
        assert fake.values(torch.bfloat16).shape == scores.shape


def test_a_target_that_is_no_class_is_the_error_of_pytorch():
    scores, labels = values(torch.float32)
    labels[1, 2] = CLASSES
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        given = later_operations.held(scores.view(-1, CLASSES), torch.float32)
        lazy = later_operations.run_on_later_values(torch.ops.aten._log_softmax.default, (given, 1, False), {})
        later_operations.run_on_later_values(
            torch.ops.aten.nll_loss_forward.default, (lazy, labels.view(-1), None, 2, -100), {}
        )
