"""What a script may do with tensors on the accelerator, without any worker: values that are here or promised."""

from __future__ import annotations

import copy
import io
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from moreh_ap.device import function_mode
from moreh_ap.device.cuda.cuda_generator import Generator
from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor
from moreh_ap.device.values import Cell, Value
from moreh_ap.device.worker_backend import IN_FORCE
from moreh_ap.session.calls import autograd_api


@pytest.fixture(autouse=True)
def redirected():
    IN_FORCE.backend = autograd_api  # all that these tests ask of a backend are its gradient functions
    mode = function_mode.RedirectMode()
    mode.__enter__()
    yield
    function_mode.remove_mode(mode)
    IN_FORCE.backend = None


class Promised(Value):
    """A value that arrives when the test says so; reading it earlier is an error."""

    __slots__ = ("arrived", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.arrived = tensor, False

    def ready(self) -> bool:
        return self.arrived

    def read(self) -> Tensor:
        if not self.arrived:
            raise AssertionError("the script waited for a value it did not ask for")
        return self.tensor


def promise(tensor: Tensor) -> tuple[Promised, VirtualTensor]:
    value = Promised(tensor)
    return value, VirtualTensor(Cell(value, ACCELERATOR), tensor)


def test_a_tensor_moves_there_and_back():
    tensor = torch.arange(6.0).reshape(2, 3).cuda()
    assert tensor.device == torch.device("cuda:0") and tensor.is_cuda and not tensor.is_cpu
    assert tensor.get_device() == 0 and tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.to("cuda") is tensor and tensor.cuda() is tensor
    back = tensor.cpu()
    assert type(back) is Tensor and torch.equal(back, torch.arange(6.0).reshape(2, 3))
    assert tensor.to("cpu", torch.float64).dtype == torch.float64
    assert tensor.to(torch.float16).is_cuda


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 3, device="cuda"),
        lambda: torch.tensor([1.0, 2.0], device="cuda:0"),
        lambda: torch.arange(3, device=torch.device("cuda")),
        lambda: torch.randn(2, device=0),
        lambda: torch.zeros_like(torch.ones(2), device="cuda"),
        lambda: torch.ones(2).new_zeros(3, device="cuda"),
        lambda: torch.as_tensor(np.ones(2), device="cuda"),
    ],
)
def test_factories_make_tensors_there(make):
    assert isinstance(make(), VirtualTensor)


@pytest.mark.parametrize("where", [(0,), (0, torch.float64), (torch.device("cuda", 0),)])
def test_a_module_moves_to_a_device_that_is_a_number(where):
    assert torch.nn.Linear(2, 2).to(*where).weight.is_cuda
    assert torch.nn.Linear(2, 2).to(device=where[0]).weight.is_cuda
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.nn.Linear(2, 2).to(1)


def test_device_contexts_and_defaults_mean_the_accelerator():
    with torch.device("cuda"):
        assert torch.nn.Linear(2, 2).weight.is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).is_cuda
    finally:
        torch.set_default_device(None)
    assert not torch.zeros(2).is_cuda


def test_random_factories_draw_the_script_s_own_stream():
    torch.manual_seed(0)
    there = torch.randn(4, device="cuda").cpu()
    torch.manual_seed(0)
    assert torch.equal(there, torch.randn(4))


def test_other_device_numbers_are_refused():
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2).cuda(1)


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


def test_gradients_flow_through_moves():
    leaf = torch.ones(3, requires_grad=True)
    (leaf.cuda() * 2).sum().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 2.0))
    there = torch.ones(3, device="cuda", requires_grad=True)
    (there.cpu() * 3).sum().backward()
    assert there.grad.is_cuda and there.grad.tolist() == [3.0, 3.0, 3.0]


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


def test_a_long_running_sum_of_arrived_promises_does_not_grow():
    total = torch.zeros((), device="cuda")
    for step in range(50):
        value, loss = promise(torch.tensor(float(step)))
        total = total + loss
        value.arrived = True
    depth, cell = 0, total._cell.value
    while getattr(cell, "_operation", None) is not None:
        cell, depth = cell._operation[1][0], depth + 1
    assert depth <= 2 and total.item() == sum(range(50))


@pytest.mark.parametrize("when", ["each arrives in time", "all arrive at the end"])
def test_a_running_total_may_be_as_long_as_a_training_run(when):
    total = torch.zeros((), device="cuda")
    promises = []
    num_steps = sys.getrecursionlimit() + 500  # a read that goes back step by step must not recurse
    for step in range(num_steps):
        value, loss = promise(torch.tensor(float(step)))
        total += loss
        promises.append(value)
        if when == "each arrives in time" and step > 0:
            promises[step - 1].arrived = True
    for value in promises:
        value.arrived = True
    assert total.item() == sum(range(num_steps))


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


def test_a_generator_of_the_accelerator():
    generator = Generator(device="cuda")
    generator.manual_seed(5)
    state = generator.get_state()
    first = torch.randn(3, generator=generator, device="cuda")
    generator.set_state(state)
    again = torch.empty(3, device="cuda").normal_(generator=generator)
    assert generator.device == ACCELERATOR and first.is_cuda and torch.equal(first.cpu(), again.cpu())
    assert torch.equal(first.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(5)))
    assert isinstance(Generator(), torch.Generator) and Generator().device == torch.device("cpu")
    assert isinstance(torch.Generator(), Generator) and isinstance(generator, torch.Generator)
    loader = torch.utils.data.DataLoader(range(8), shuffle=True, batch_size=4, generator=generator)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(8))


def test_packed_sequences():
    rows, lengths = torch.randn(3, 5, 2), torch.tensor([2, 5, 3])
    expected = torch.nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
    there = rows.cuda().requires_grad_()
    packed = torch.nn.utils.rnn.pack_padded_sequence(there, lengths, batch_first=True, enforce_sorted=False)
    assert packed.data.is_cuda and not packed.batch_sizes.is_cuda
    assert torch.equal(packed.data.detach().cpu(), expected.data)
    padded, found = torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, padding_value=-1.0)
    assert padded.is_cuda and torch.equal(found, lengths)
    wanted, _ = torch.nn.utils.rnn.pad_packed_sequence(expected, batch_first=True, padding_value=-1.0)
    assert torch.equal(padded.detach().cpu(), wanted)
    padded.square().sum().backward()
    kept = torch.arange(5) < lengths[:, None]
    torch.testing.assert_close(there.grad.cpu(), 2 * rows * kept[..., None])


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


@pytest.mark.parametrize(
    "compose",
    [
        lambda x: torch.unravel_index((x > 0).long(), (2, 3))[1],
        lambda x: torch.tensor_split(x, torch.tensor([1, 2]))[1],
        lambda x: x.tensor_split(torch.tensor(2, device="cpu"))[0],
        lambda x: torch.svd_lowrank(x, q=2)[1],
        lambda x: torch.linalg.matrix_rank(x),
        lambda x: torch.fft.hfft(x),
        lambda x: torch.nn.functional.embedding_bag((x > 0).long(), x.new_ones(2, 5), mode="sum"),
        lambda x: torch.nn.functional.fractional_max_pool2d(x[None, None], 2, output_size=2),
    ],
)
def test_functions_that_pytorch_composes_with_tensors_of_its_own(compose):
    x = torch.arange(24.0).view(4, 6).sin()
    results = []
    for tensor in (x, x.cuda()):
        torch.manual_seed(0)
        results.append(compose(tensor))
    assert results[1].is_cuda and torch.equal(results[0], results[1].cpu())


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
