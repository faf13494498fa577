"""Tensors on the accelerator that are ordinary ones of this process: the numbers of a CPU, and what a script sees."""

from __future__ import annotations

import copy
import dataclasses
import io
import threading
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from moreh_ap.device import function_mode
from moreh_ap.device.host_tensors import HOST, HostTensor, as_host, hold, let_go, on_accelerator, without_class
from moreh_ap.device.patches import native_calls
from moreh_ap.device.tensor import VirtualTensor, place
from moreh_ap.patching import Patches

LOG: list = []


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.LSTM(4, 8, 2, batch_first=True, dropout=0.5), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.recurrent(x[:, None])[0])[:, 0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return {"out": self.second(self.first(x).tanh()), "count": self.num_calls, "none": None}


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))

    def forward(self, x):
        hidden = checkpoint(self.block, x.requires_grad_(), use_reentrant=True)
        return hidden + checkpoint(self.block, x, use_reentrant=False)


class OnDevice(nn.Module):
    """Makes a tensor on "cuda" where its parameter was said to be."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.layer, self.norm, self.device = nn.Linear(4, 3), nn.BatchNorm1d(3), device

    def forward(self, x):
        noise = F.dropout(self.norm(self.layer(x)), 0.5)
        return noise + torch.ones(3, device=self.device)


class Remembering(nn.Module):
    """Keeps what it computed: in an attribute, a list, or an object."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 3), None

    def forward(self, x):
        self.last = self.layer(x)
        return self.last * 2


class Collecting(Remembering):
    def __init__(self):
        super().__init__()
        self.all = []

    def forward(self, x):
        self.all.append(self.layer(x))
        return self.all[-1] * 2


class Box:
    value = None


class Boxing(Remembering):
    def __init__(self):
        super().__init__()
        self.box = Box()

    def forward(self, x):
        self.box.value = self.layer(x)
        return self.box.value * 2


class Caching(Remembering):
    """Makes a buffer and an attribute at its third call."""

    def forward(self, x):
        if self.last is None:
            self.last = 0
        self.last += 1
        if self.last > 2 and not hasattr(self, "scale"):
            self.register_buffer("scale", x.new_full((3,), 2.0))
            self.shift = x.new_full((3,), 0.5)
        return self.layer(x) * getattr(self, "scale", 1.0) + getattr(self, "shift", 0.0)


class Filling(nn.Module):
    """Changes what it is given, a dict, and a parameter."""

    def __init__(self):
        super().__init__()
        self.layer, self.average = nn.Linear(4, 3), nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x):
        box = x if isinstance(x, dict) else {"x": x}
        box["hidden"] = self.layer(box["x"])
        with torch.no_grad():
            self.average.lerp_(box["hidden"].mean(0), 0.5)
        return box["hidden"] - self.average


class Logging(Remembering):
    def forward(self, x):
        LOG.append(self.layer(x))
        return LOG[-1] * 2


@dataclasses.dataclass
class Config:
    scale: float = 2.0


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.layer = Config(), nn.Linear(4, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x, shift=None):
        hidden = F.dropout(self.layer(x), 0.5, self.training) * self.config.scale
        return hidden + (self.shift if shift is None else shift)


MODELS = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)),
    "recurrent": Recurrent,
    "tied": Tied,
    "checkpointed": Checkpointed,
    "configured": Configured,
    "attribute": Remembering,
    "list": Collecting,
    "object": Boxing,
    "global": Logging,
    "third call": Caching,
}


@pytest.fixture(autouse=True)
def native_functions(redirected):
    """Functions that no mode sees return host tensors, and so does a move to the accelerator."""
    patches = Patches()
    native_calls.install_transforms(patches)
    native_calls.install(patches)
    HOST.holds_all = True
    yield
    HOST.holds_all = False
    patches.undo()


class Script:
    """A model of host tensors, or an ordinary one on the CPU."""

    def __init__(self, make, device):
        torch.manual_seed(0)
        self.model, self.device = make(), device
        if device == "cuda":
            seen = {}
            for part in self.model.modules():
                for held in (part._parameters, part._buffers):
                    for name, tensor in held.items():
                        if id(tensor) not in seen:
                            seen[id(tensor)] = moved(tensor), tensor
                        held[name] = seen[id(tensor)][0]
                if hasattr(part, "flatten_parameters"):
                    part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def batch(self, seed):
        return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(self.device)


def moved(tensor):
    is_parameter = isinstance(tensor, nn.Parameter)
    host = tensor.detach().cuda()
    return nn.Parameter(host, tensor.requires_grad) if is_parameter else host


def train(make, device):
    LOG.clear()
    script = Script(make, device)
    losses = []
    for step in range(4):
        result = script(script.batch(step))
        loss = (result["out"] if isinstance(result, dict) else result).pow(2).mean()
        loss.backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
        losses += [loss.item(), torch.rand(()).item()]
    losses += [float(buffer.sum()) for buffer in script.model.buffers()]
    return losses, script


@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_numbers_of_ordinary_tensors(name):
    losses, script = train(MODELS[name], "cuda")
    assert losses == train(MODELS[name], "cpu")[0]
    assert all(type(parameter) is HostTensor for parameter in script.model.parameters())


@pytest.mark.parametrize("name", ["attribute", "list", "object", "global", "third call"])
def test_what_a_forward_leaves_is_on_the_accelerator(name):
    _, script = train(MODELS[name], "cuda")
    left = {"attribute": "last", "list": "all", "object": "box", "third call": "shift"}.get(name)
    kept = LOG if left is None else getattr(script.model, left)
    for one in kept if isinstance(kept, list) else [getattr(kept, "value", kept)]:
        assert one.device == torch.device("cuda", 0) and (one.grad_fn is not None or name == "third call")


def test_a_forward_that_makes_tensors_on_the_accelerator():
    assert train(lambda: OnDevice("cuda"), "cuda")[0] == train(OnDevice, "cpu")[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_in_place_operations_on_results(device):
    script = Script(MODELS["layers"], device)
    result = script(script.batch(0))
    result += 1
    result[0].mul_(2)
    result.sum().backward()
    squashed = Script(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), device)
    result = squashed(squashed.batch(0))
    result.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def penalties(device):
    script = Script(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), device)
    found = []
    for step in range(3):
        x = script.batch(step).requires_grad_()
        result = script(x)
        (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        assert gradient.device == x.device
        penalty = (gradient.norm(dim=1) - 1).pow(2).mean() + x.mean() + result.mean()
        penalty.backward()
        gradients = [x.grad, *(parameter.grad for parameter in script.model.parameters())]
        assert all(one is None or one.device == x.device for one in gradients)
        found += [penalty.item(), *(float(one.sum()) for one in gradients if one is not None)]
        script.optimizer.step()
        script.optimizer.zero_grad()
    return found


def test_gradients_of_gradients():
    assert penalties("cuda") == penalties("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_blocks_that_the_script_has_computed_again(device):
    script = Script(MODELS["layers"], device)
    for reentrant in (False, True):
        hidden = script.batch(0).requires_grad_()
        checkpoint(script, hidden, use_reentrant=reentrant).sum().backward()
        assert hidden.grad.abs().sum() > 0 and hidden.grad.device == hidden.device


def host(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda()


def test_a_script_sees_a_tensor_on_the_accelerator():
    x = host(2, 3)
    assert x.is_cuda and not x.is_cpu and x.device == torch.device("cuda:0") and x.get_device() == 0
    assert x.layout is torch.strided and "device='cuda:0'" in repr(x) and x.type() == "torch.cuda.FloatTensor"
    assert not x.cpu().is_cuda and type(x.cpu()) is torch.Tensor and type(x.to("cpu", torch.float64)) is torch.Tensor
    for made in (
        x.to(torch.float64),
        x.type(torch.float64),
        x.type_as(x.double()),
        x.double(),
        x.data,
        x[0],
        x.max(1).values,
        x.split(1)[0],
        torch.zeros_like(x, device="cuda"),
        torch.zeros(2, device=x.device),
        x.new_zeros(2),
        x.new_tensor([1.0]),
        torch.stack([x, x]),
        torch.tensor(x),
        torch.as_tensor([1.0], device="cuda"),
        F.layer_norm(x, (3,)),
        nn.utils.rnn.pad_sequence([x, x]),
        nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([2]), batch_first=True).data,
        copy.deepcopy(x),
    ):
        assert type(made) is HostTensor, made
    assert type(torch.zeros_like(x, device="cpu")) is torch.Tensor and type(x.type("torch.FloatTensor")) is torch.Tensor
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        x.numpy()
    assert x.tolist() == x.cpu().tolist() == x.detach().to_host().tolist()
    x.data = torch.ones(2, 3)
    assert float(x.sum()) == 6


class Seen(TorchFunctionMode):
    """Notes the functions of PyTorch that a thread calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_questions_that_no_tensor_answers_pass_no_function_mode():
    x = (host(2, 3) * 2).requires_grad_()
    with Seen() as seen:
        assert (x.dim(), x.ndim, x.numel(), x.size(1), x.size(), x.shape) == (2, 2, 6, 3, (2, 3), torch.Size((2, 3)))
        assert x.dtype == torch.float32 and x.is_floating_point() and not x.is_complex() and x.stride(0) == 3
        assert x.is_leaf and x.grad_fn is None and x.is_contiguous()
        x[0]
    assert seen.names == ["__getitem__"]
    doubled = (x * 2).sum()
    assert not doubled.is_leaf and doubled.grad_fn is not None and bool(doubled == doubled.item())


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor])
def test_tensors_made_of_numbers_and_tensors_in_lists(make):
    x = host(3)
    assert make(data=[1.0, 2.0], device="cuda").tolist() == [1, 2]
    assert type(make(data=x)) is HostTensor and make(data=x).tolist() == x.tolist()
    for data in ([x[0], x[1]], [[x[0]], [x[1]]], (x[0], 2.0)):
        made = make(data, device="cuda", dtype=torch.float64)
        assert type(made) is HostTensor and made.dtype == torch.float64 and made.flatten()[0].item() == x[0].item()


def test_a_list_of_numbers_is_read_by_pytorch_alone(monkeypatch):
    numbers = [0.5] * 4
    monkeypatch.setattr(function_mode, "tree_map_only", None)
    assert torch.tensor(numbers, device="cuda").tolist() == numbers


def test_a_tensor_on_the_cpu_is_on_another_device():
    x, other = host(3), torch.ones(3)
    for call in (lambda: x + other, lambda: torch.cat([x, other]), lambda: x.add_(other), lambda: F.mse_loss(x, other)):
        before = x.tolist()
        with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
            call()
        assert x.tolist() == before
    assert type(x + torch.tensor(2.0)) is HostTensor
    assert x.copy_(other).sum() == 3 and type(x) is HostTensor
    assert type(other.copy_(x)) is torch.Tensor and type(x[torch.tensor([0])]) is HostTensor
    x[torch.tensor([True, False, False])] = 5.0
    assert x.tolist() == [5, 1, 1]
    assert type(other[:1].expand_as(x)) is type(other.view_as(x)) is torch.Tensor
    assert type(x.reshape_as(other)) is HostTensor


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_sparse_tensor_of_host_tensors_is_one(layout):
    rows, columns = torch.tensor([0, 0, 1]), as_host(torch.tensor([0, 2, 1]).cuda())
    values = as_host(torch.tensor([2.0, 1.0, 3.0]).cuda()).requires_grad_()
    if layout is torch.sparse_coo:
        made = torch.sparse_coo_tensor(torch.stack([as_host(rows.cuda()), columns]), values, (2, 3))
    else:
        made = torch.sparse_csr_tensor(as_host(torch.tensor([0, 2, 3]).cuda()), columns, values, (2, 3))
    assert type(made) is HostTensor and made.is_cuda and made.layout is layout
    product = made @ as_host(torch.tensor([[1.0], [2.0], [3.0]]).cuda())
    product.sum().backward()
    assert product.flatten().tolist() == [5.0, 6.0] and values.grad.tolist() == [1.0, 3.0, 2.0]
    on_cpu = torch.sparse_coo_tensor(torch.stack([as_host(rows.cuda()), columns]), values, (2, 3), device="cpu")
    assert not on_cpu.is_cuda and on_cpu.to_dense().tolist() == [[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]]


def test_a_thread_waits_for_tensors_that_another_has_without_their_class():
    weight, x, is_without, results = host(3, 4), host(2, 4), threading.Event(), []

    def have_it_without_class():
        with without_class([weight]):
            is_without.set()
            time.sleep(0.2)

    def multiply():
        with function_mode.RedirectMode():  # as threads of the script have it (`patches/threads.py`)
            is_without.wait()
            results.append(F.linear(x, weight))

    threads = [threading.Thread(target=run) for run in (have_it_without_class, multiply)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(one) for one in results] == [HostTensor]


def test_counts_of_packed_rows_are_on_the_cpu():
    gru, x = nn.GRU(3, 2, batch_first=True), host(2, 4, 3)
    expected = gru(nn.utils.rnn.pack_padded_sequence(x.cpu(), [4, 2], batch_first=True))[1]
    for name, tensor in gru.named_parameters():
        setattr(gru, name, moved(tensor))
    packed = nn.utils.rnn.pack_padded_sequence(x, [4, 2], batch_first=True)
    ours = gru(packed)[1]
    assert not packed.batch_sizes.is_cuda and type(ours) is HostTensor and torch.equal(ours.cpu(), expected)


def test_other_virtual_tensors_become_host_tensors():
    x, other = host(3), place(torch.ones(3))
    assert type(x + other) is HostTensor and type(other) is HostTensor
    leaf = place(torch.ones(3)).requires_grad_()
    squared = leaf * leaf  # in the graph of virtual tensors
    assert type(leaf) is VirtualTensor
    (squared * x).sum().backward()
    assert torch.allclose(leaf.grad.cpu(), 2 * x.cpu())
    written = leaf * 2
    written += x
    assert type(written) is VirtualTensor and torch.allclose(written.cpu(), 2 + x.cpu())


def test_a_graph_goes_through_both_classes():
    x = host(3).requires_grad_()
    through = as_host(on_accelerator(x * 2) * 3)
    assert type(through) is HostTensor
    (first,) = torch.autograd.grad((through**2).sum(), x, create_graph=True)
    first.sum().backward()
    assert torch.allclose(first.cpu(), 72 * x.detach().cpu()) and torch.allclose(x.grad.cpu(), torch.full((3,), 72.0))


def test_a_tensor_changes_its_class_in_place():
    HOST.holds_all = False
    weight = nn.Parameter(torch.ones(2).cuda())
    weight.of_script = "kept"
    (weight * 3).sum().backward()
    later = (weight * 5).sum()
    hold(weight)
    hold(weight)
    assert type(weight) is HostTensor and isinstance(weight, nn.Parameter) and weight.of_script == "kept"
    assert weight.grad.tolist() == [3, 3]
    later.backward()
    assert weight.grad.tolist() == [8, 8]
    with torch.no_grad():
        weight.add_(1)
    let_go(weight)
    let_go(weight)
    assert type(weight) is VirtualTensor and isinstance(weight, nn.Parameter) and weight.of_script == "kept"
    assert weight.tolist() == [2, 2] and weight.grad.tolist() == [8, 8] and type(weight.grad) is VirtualTensor
    weight.grad = None
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [2, 2]


def test_a_parameter_that_changes_its_class_in_inference_mode_can_be_trained_afterwards():
    HOST.holds_all = False
    weight = nn.Parameter(torch.ones(2).cuda())
    (weight * 3).sum().backward()
    for change, kind in ((hold, HostTensor), (let_go, VirtualTensor)):
        with torch.inference_mode():
            change(weight)
        assert type(weight) is kind and weight.grad.tolist() == [3, 3]
        assert not weight.is_inference() and not weight.grad.is_inference()
        weight.grad = None
        (weight * 3).sum().backward()


def test_a_change_after_a_forward_is_noticed_although_the_class_has_changed_since():
    HOST.holds_all = False
    weight = nn.Parameter(torch.ones(2).cuda())
    loss = (weight * weight).sum()
    hold(weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_and_functions_of_a_script():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2 + torch.zeros_like(ctx.saved_tensors[0]) + torch.ones(3).sub_(1)

    x, seen = host(3).requires_grad_(), []
    y = Double.apply(x)
    y.register_hook(lambda gradient: seen.append(gradient.device))
    y.retain_grad()
    y.sum().backward()
    assert type(y) is HostTensor and seen == [x.device] and y.grad.device == x.device
    assert x.grad.tolist() == [2, 2, 2]
    assert type(torch.jit.script(_twice)(x)) is HostTensor and type(torch.autograd.Variable(x)) is HostTensor


def _twice(x):
    return x * 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_that_hooks_of_modules_keep(device):
    """They are computed with after the backward (Grad-CAM, K-FAC), and hooks may give others."""
    script, kept = Script(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), device), []
    first, last = script.model[0], script.model[2]
    last.register_full_backward_pre_hook(lambda module, grad_output: (2 * grad_output[0],))
    last.register_full_backward_hook(lambda module, grad_input, grad_output: kept.extend([*grad_input, *grad_output]))
    first.register_full_backward_hook(lambda module, grad_input, grad_output: kept.append(grad_output[0]))
    script(script.batch(0)).sum().backward()
    assert [one.device for one in kept] == 3 * [first.weight.device]
    weights = kept[2].mean(0, keepdim=True) * first.weight.T
    assert weights.device == first.weight.device and kept[1].cpu().eq(2).all()
    torch.testing.assert_close(first.weight.grad, kept[2].T @ script.batch(0))


def test_gradients_of_a_module_on_the_cpu_beside_host_tensors():
    kept, layer = [], nn.Linear(4, 3)
    layer.register_full_backward_hook(lambda module, grad_input, grad_output: kept.append(grad_output[0]))
    layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert kept[0].device.type == "cpu" and not kept[0].is_cuda


def test_transforms_of_functions():
    x, matrix = host(3), host(3, 3)

    def energy(x):
        return (matrix @ x.sin()).pow(2).sum()

    def on_cpu(x):
        return (matrix.cpu() @ x.sin()).pow(2).sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian, torch.func.jacfwd):
        ours = transform(energy)(x)
        assert type(ours) is HostTensor and torch.equal(ours.cpu(), transform(on_cpu)(x.cpu()))
    assert torch.equal(torch.vmap(energy)(matrix).cpu(), torch.vmap(on_cpu)(matrix.cpu()))
    value, pull = torch.func.vjp(energy, x)
    assert type(value) is HostTensor and type(pull(torch.ones((), device="cuda"))[0]) is HostTensor
    value, tangent = torch.func.jvp(energy, (x,), (torch.ones_like(x),))
    assert type(tangent) is HostTensor and torch.equal(
        tangent.cpu(), torch.func.jvp(on_cpu, (x.cpu(),), (torch.ones(3),))[1]
    )
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert type(dual) is HostTensor
        assert type(torch.autograd.forward_ad.unpack_dual(energy(dual)).tangent) is HostTensor


def test_a_file_has_ordinary_tensors():
    linear, file = nn.Linear(3, 2), io.BytesIO()
    linear.weight = nn.Parameter(linear.weight.detach().cuda())
    torch.save(linear.state_dict(), file)
    file.seek(0)
    assert type(torch.load(file, map_location="cpu")["weight"]) is torch.Tensor


def test_precision_of_autocast():
    x, weight = host(3, 3), host(3, 3)
    with torch.autocast("cpu"):
        expected = (x.cpu() @ weight.cpu()).dtype
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert (x @ weight).dtype == expected == torch.bfloat16
        assert F.layer_norm((x @ weight), (3,)).dtype == torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_a_tensor_is_freed_with_its_last_reference():
    x = host(3)
    reference = weakref.ref(x)
    del x
    assert reference() is None


def test_others_that_share_the_memory_follow_a_parameter_that_was_held():
    """What a module keeps of its parameter, and the parameter after a step in this process: workers train it next."""
    parameter = nn.Parameter(place(torch.ones(3)))
    kept = parameter.detach()
    for _ in range(2):
        hold(parameter)
        with torch.no_grad():
            parameter.add_(1)
        let_go(parameter)
        assert kept._cell is parameter._cell and torch.equal(kept.host_value(), parameter.host_value())
    hold(parameter)
    parameter.data = torch.zeros(3)  # another memory from here on
    let_go(parameter)
    assert kept._cell is not parameter._cell and kept.host_value().tolist() == [3.0, 3.0, 3.0]
