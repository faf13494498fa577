"""What PyTorch's functions make and move while "cuda" is the accelerator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moreh_ap.device.tensor import VirtualTensor


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


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor])
def test_data_given_by_name_and_tensors_in_lists(make):
    x = torch.arange(3.0).cuda()
    assert make(data=[1.0, 2.0], device="cuda").tolist() == [1, 2] and make(data=[1.0]).device.type == "cpu"
    assert make(data=x).tolist() == [0, 1, 2]
    made = make([[x[1]], [x[2]]], device="cuda", dtype=torch.float64)
    assert isinstance(made, VirtualTensor) and made.dtype == torch.float64 and made.tolist() == [[1], [2]]


@pytest.mark.parametrize("weights", [[0.5, 2.0], [0.0, 0.0]])
def test_a_backward_is_given_a_gradient_by_name(weights):
    """As PyTorch passes on the first argument of ``y.backward(weights)``, also of one number that is zero."""
    for count in (2, 1):
        x, gradient = torch.ones(count).cuda().requires_grad_(), torch.tensor(weights[:count])
        (3 * x).backward(gradient.cuda())
        (3 * x).backward(gradient=gradient.cuda(), inputs=x)
        assert x.grad.tolist() == (6 * gradient).tolist()


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
