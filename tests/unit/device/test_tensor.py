"""What a script sees of a tensor on the accelerator, without any worker."""

from __future__ import annotations

import copy
import io

import pytest
import torch


def test_autograd_and_optimizers_work():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 3))
    there = torch.nn.Parameter(weight.detach().cuda())
    assert isinstance(there, torch.nn.Parameter) and there.is_cuda
    x = torch.randn(4, 3)
    for parameter, given in ((weight, x), (there, x.cuda())):
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (given @ parameter).pow(2).mean().backward()
            optimizer.step()
    assert there.grad.is_cuda
    assert torch.equal(there.detach().cpu(), weight.detach())


def test_numbers_print_and_convert():
    value = torch.tensor(1.25).cuda()
    assert f"{value:.3f}" == "1.250" and float(value) == 1.25 and value.item() == 1.25 and bool(value)
    assert "device='cuda:0'" in repr(torch.ones(2).cuda())
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        torch.ones(2).cuda().numpy()


def test_copies_and_pickles_are_complete():
    tensor = torch.arange(3.0).cuda()
    copied = copy.deepcopy(tensor)
    copied.add_(1)
    assert tensor.tolist() == [0, 1, 2] and copied.is_cuda
    file = io.BytesIO()
    torch.save({"weight": torch.nn.Parameter(torch.ones(2).cuda())}, file)
    file.seek(0)
    loaded = torch.load(file)["weight"]
    assert type(loaded) is torch.nn.Parameter and not loaded.is_cuda


def test_moving_a_module_keeps_its_parameter_objects():
    module = torch.nn.Linear(3, 4)
    parameter, values = module.weight, module.weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.cuda()
    assert module.weight is parameter and parameter.is_cuda and isinstance(parameter, torch.nn.Parameter)
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert torch.equal(parameter.detach().cpu(), values)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
def test_sparse_tensors_of_every_layout(layout):
    host = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]]).to_sparse(layout=layout)
    tensor, x = host.cuda(), torch.ones(3, 2).cuda().requires_grad_()
    assert tensor.is_cuda and tensor.layout is layout and tensor.cpu().layout is layout
    assert (tensor.is_sparse, tensor.is_sparse_csr) == (host.is_sparse, host.is_sparse_csr)
    product = torch.sparse.mm(tensor, x)
    (product + tensor @ x).sum().backward()
    assert torch.equal(product.cpu(), torch.tensor([[2.0, 2.0], [4.0, 4.0]]))
    assert torch.equal(x.grad.cpu(), torch.tensor([[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]))
    assert torch.equal(tensor.t().to_dense().cpu(), host.to_dense().t())
    if layout is torch.sparse_csr:
        assert tensor.crow_indices().tolist() == [0, 1, 3] and tensor.values().is_cuda


class WrittenBehindAutograd(torch.autograd.Function):
    """Fills one column of its argument and returns that: what solvers of ODEs do with their intermediate slopes."""

    @staticmethod
    def forward(ctx, columns, value, index):
        ctx.index = index
        columns.data[:, index] = value
        return columns

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient[:, ctx.index], None


def test_autograd_does_not_notice_what_is_written_to_data():
    def script(device):
        weight = torch.ones(4, device=device, requires_grad=True)
        columns = torch.zeros(4, 3, device=device)
        value = weight * 2
        for index in range(3):
            columns = WrittenBehindAutograd.apply(columns, value, index)
            value = weight + columns[:, : index + 1].sum(1).square()
        assert columns._version == 0
        other = torch.zeros(2, device=device)
        other.detach().mul_(2)
        other.data.mul_(2)
        assert other._version == 1
        return torch.autograd.grad(columns.sum() + value.sum(), weight)[0].cpu()

    assert torch.equal(script("cuda"), script("cpu"))


def test_a_gradient_can_be_deleted():
    weight = torch.ones(3, device="cuda", requires_grad=True)
    (2 * weight).sum().backward()
    del weight.grad
    assert weight.grad is None
