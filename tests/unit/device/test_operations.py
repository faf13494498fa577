"""Operations on tensors of the accelerator, computed here, put off, or refused."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.device import operations
from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor
from moreh_ap.device.values import Cell, View
from unit.device.samples import promise


def test_mixing_devices_raises_pytorch_s_error():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3).cuda() + torch.ones(3)
    assert (torch.ones(3).cuda() + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]


def test_views_and_in_place_operations_share_memory():
    tensor = torch.arange(6.0).reshape(2, 3).cuda()
    tensor[:, 1:].zero_()
    assert tensor.tolist() == [[0, 0, 0], [3, 0, 0]]
    labels = torch.arange(4).cuda()
    labels[torch.tensor([True, False, True, False]).cuda()] = -100
    assert labels.tolist() == [-100, 1, -100, 3]
    tensor.unsqueeze_(0)
    assert tensor.shape == (1, 2, 3)


def test_a_view_of_what_is_elsewhere_that_is_seen_otherwise_from_now_on():
    base = torch.arange(6.0).reshape(2, 3).cuda()
    row = VirtualTensor(Cell(View(base._cell, lambda whole: whole[1:]), ACCELERATOR), torch.empty(1, 3, device="meta"))
    before = row.detach()
    row.squeeze_(0).add_(1)
    assert (row.shape, (row * 2).tolist(), before.tolist()) == ((3,), [8, 10, 12], [[4, 5, 6]])
    before.t_()
    assert before.tolist() == [[4], [5], [6]]
    before.zero_()
    assert base.tolist() == [[0, 1, 2], [0, 0, 0]]


def test_a_conversion_that_changes_nothing_returns_the_tensor_itself_in_inference_mode_too():
    _, elsewhere = promise(torch.ones(2, 2))
    model = torch.nn.Linear(2, 2).cuda()
    weight, cell = model.weight, model.weight._cell
    with torch.inference_mode():
        for tensor in (elsewhere, weight):
            assert tensor.float() is tensor and tensor.contiguous() is tensor and tensor.to("cuda") is tensor
        model.float()  # validation of ultralytics
        assert model.weight is weight and weight._cell is cell
        model.half()
    assert model.weight.dtype == torch.float16


def test_arithmetic_on_a_promise_does_not_wait():
    value, loss = promise(torch.tensor(3.0))
    total = torch.zeros((), device="cuda")
    total += loss.detach()
    scaled = loss / 4
    grown = torch.ones_like(loss)
    assert scaled.shape == () and grown.item() == 1.0
    value.arrived = True
    assert scaled.item() == 0.75 and total.item() == 3.0


def test_in_place_changes_after_a_deferred_operation_do_not_reach_it():
    value, loss = promise(torch.tensor(2.0))
    factor = torch.tensor(5.0).cuda()
    product = loss * factor
    factor.add_(1)
    alias = loss.detach()
    value.arrived = True
    alias.mul_(100)
    assert product.item() == 10.0 and loss.item() == 200.0


def test_what_depends_on_the_shape_alone_waits_for_nothing():
    _, loss = promise(torch.tensor([3.0, 4.0]))
    assert torch.zeros_like(loss).tolist() == [0.0, 0.0] and loss.new_ones(3).tolist() == [1.0] * 3


def test_large_operations_random_ones_and_views_of_promises_are_not_put_off():
    for operation in (
        lambda loss: loss.expand(5000) + 1,
        lambda loss: torch.bernoulli(loss * 0.1),
        lambda loss: loss.reshape(1, 1) + 1,
    ):
        _, loss = promise(torch.tensor([3.0]))
        with pytest.raises(AssertionError, match="waited for a value"):
            operation(loss)


def test_adding_a_promise_in_place_is_put_off_unless_another_view_looks_at_the_memory():
    value, loss = promise(torch.tensor(3.0))
    total = torch.zeros((), device="cuda")
    total += loss
    seen = torch.zeros(2, device="cuda")
    row = seen[0]
    with pytest.raises(AssertionError, match="waited for a value"):
        row += loss
    value.arrived = True
    assert total.item() == 3.0
    row += loss
    assert seen.tolist() == [3.0, 0.0]


def test_arguments_that_an_operation_changes_are_found_said_or_unsaid():
    aten = torch.ops.aten
    x, mean, variance = (torch.zeros(3).cuda() for _ in range(3))
    image = torch.zeros(2, 3).cuda()

    def written(func, *args, **kwargs):
        return [id(tensor) for tensor in operations.written_arguments(func, args, kwargs)]

    assert written(aten.add_.Tensor, x, mean) == [id(x)]
    assert written(aten.add.Tensor, x, mean) == []
    assert written(aten.add.out, x, mean, out=variance) == [id(variance)]
    assert written(aten._foreach_add_.Scalar, [x, mean], 1) == [id(x), id(mean)]
    args = (image, None, None, mean, variance, True, 0.1, 1e-5)
    assert written(aten.native_batch_norm.default, *args) == [id(mean), id(variance)]


# -- plain operations: the same with and without looking for tensors in nested arguments ---------------------------


def _numbers():
    return torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y: x + y,
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x * torch.tensor(2.0),
        lambda x, y: torch.cat([x, y], dim=1),
        lambda x, y: x.max(dim=1).indices,
        lambda x, y: x[[1, 0]],
        lambda x, y: torch.where(x > 2, x, y),
        lambda x, y: x.mul_(y).add_(1),
        lambda x, y: [x, torch._foreach_add_([x, y], 1.0)][0] + y,
        lambda x, y: torch.stack(torch._foreach_mul([x, y], [2.0, 3.0])),
        lambda x, y: x.split(2, dim=1)[0],
        lambda x, y: [x, x.unbind(1)[1].add_(1), x.chunk(2)[0].mul_(2)][0],
        lambda x, y: [x, x.t().add_(1)][0],
        lambda x, y: [x, x.t_()][0],
        lambda x, y: torch.add(x, y, out=y),
        lambda x, y: [y, y.copy_(x)][0],
        lambda x, y: torch.nn.functional.batch_norm(x, y[0], y[1].clone(), training=True) + y[0],
    ],
)
def test_plain_operations_give_what_the_complete_way_gives(compute, monkeypatch):
    expected = compute(_numbers(), _numbers() + 1)
    fast = compute(_numbers().cuda(), (_numbers() + 1).cuda())
    with monkeypatch.context() as patch:
        patch.setattr(operations, "_compute_plain", lambda *_: NotImplemented)
        complete = compute(_numbers().cuda(), (_numbers() + 1).cuda())
    assert fast.is_cuda and complete.is_cuda
    assert torch.equal(fast.cpu(), expected) and torch.equal(complete.cpu(), expected)


def test_plain_operations_do_not_search_nested_arguments(monkeypatch):
    x = _numbers().cuda()
    monkeypatch.setattr(operations, "tree_leaves", None)
    assert (x @ x.t() + 1).relu().sum().item() == 87.0
    assert float(x.split(2, dim=1)[0].sum()) == 8.0


def test_numbers_of_promises_and_of_no_single_value():
    value, promised = promise(torch.tensor(2.5))
    value.arrived = True
    assert (float(promised + 1), int(promised), bool(promised > 3)) == (3.5, 2, False)
    with pytest.raises(ValueError, match="only one element"):
        float(_numbers().cuda())


def test_what_shares_memory_with_a_view_is_not_replaced():
    x = _numbers().cuda()
    row = x[0]
    assert x._cell.has_views and row._cell.has_views
    other = _numbers().cuda()
    assert all(part._cell.has_views for part in (other, *other.chunk(2)))


def test_random_numbers_are_in_the_order_that_a_promise_turns_out_to_have():
    channels_last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for like in (torch.empty_like, torch.rand_like):
        value, promised = promise(torch.randn(2, 3, 4, 4))
        assert like(promised).stride() == promised.stride()  # waits for nothing
        value.tensor, value.is_order_known = channels_last, lambda: False
        with pytest.raises(AssertionError, match="waited for a value"):
            like(promised)
        value.arrived = True
        assert like(promised).stride() == like(promised).stride() == channels_last.stride()
