"""Gradients that are differentiated again (`create_graph=True`): each compared with one process, or refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from test_one_line_training import assert_same, on_both
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from moreh_ap import device
from moreh_ap.errors import UnsupportedError

pytestmark = pytest.mark.rotating  # one more way to ask for them each


@pytest.fixture(autouse=True)
def session(accelerator):
    return accelerator("replicate=2")


def critic(device, activation=nn.LeakyReLU):
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), activation(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    return nn.Sequential(*layers).to(device)


def batch(device, *shape):
    return torch.randn(*(shape or (7, 6))).to(device)


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


def penalty(model, x):
    """As in WGAN-GP."""
    x = x.detach().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out, x, grad_outputs=torch.ones_like(out), create_graph=True, retain_graph=True)
    return ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def test_a_plan_of_the_planner_gives_way(accelerator):
    """It does not know what a script will ask for. These workers know no other model that is trained."""

    def script(device):
        model, trace = critic(device, nn.Softplus), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            x = batch(device)
            loss = model(x).mean() + penalty(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss)
        return trace, model.state_dict()

    device.disable()
    session = accelerator("replicate=2", num_micro_batches=2)
    session.options = replace(session.options, plan=None)
    assert_same(*on_both(script))
    assert session.outbox.times_restarted


def test_a_gradient_penalty_trains_as_on_one_device():
    def script(device):
        model, trace = critic(device), []
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(3):
            real, fake, share = batch(device), batch(device), torch.rand(7, 1).to(device)
            optimizer.zero_grad()
            loss = model(fake).mean() - model(real).mean() + 10 * penalty(model, share * real + (1 - share) * fake)
            loss.backward()
            trace.append((loss, gradients_of(model)))
            optimizer.step()
        return trace

    assert_same(*on_both(script))


def test_third_derivatives_and_a_loss_of_all_of_them():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x, t):
            return self.layers(torch.cat([x, t], 1))

    def script(device):
        torch.manual_seed(0)
        model, trace = Network().to(device), []
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(2):
            x, t = (torch.rand(9, 1).to(device).requires_grad_() for _ in range(2))
            u = model(x, t)
            first = torch.autograd.grad(u, [x, t], torch.ones_like(u), create_graph=True)
            (second,) = torch.autograd.grad(first[0], x, torch.ones_like(u), create_graph=True)
            (third,) = torch.autograd.grad(second.sum(), x, create_graph=True)
            loss = (first[1] + u * first[0] - 0.1 * second + 0.01 * third).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            trace.append((loss, first, second, third, gradients_of(model), x.grad, t.grad))
            optimizer.step()
        return trace

    assert_same(*on_both(script))


def test_losses_and_sums_inside_the_model_and_inputs_without_rows():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic, self.scale = critic("cpu"), nn.Parameter(torch.tensor(1.5))

        def forward(self, x, weight):
            score = self.critic(x * weight)
            return score, score.square().mean(), self.scale * self.scale

    def script(device):
        model, x = Network().to(device), batch(device).requires_grad_()
        weight = torch.rand(6).to(device).requires_grad_()
        score, mean, scale = model(x, weight)
        first, of_weight = torch.autograd.grad(mean * scale + score.sum(), [x, weight], create_graph=True)
        (first.square().sum() + of_weight.pow(3).sum() + mean).backward()
        return first, of_weight, x.grad, weight.grad, gradients_of(model)

    assert_same(*on_both(script))


def test_gradients_of_outputs_that_depend_on_the_outputs():
    def script(device):
        model, x = critic(device), batch(device).requires_grad_()
        y = model(x)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        (second.sum() + first.sum() + y.sum()).backward()
        return first, second, x.grad, gradients_of(model)

    assert_same(*on_both(script))


def test_gradients_of_parameters_go_into_another_loss():
    def script(device):
        model, x = critic(device), batch(device)
        parameters = list(model.parameters())
        first = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
        vectors = [torch.ones_like(parameter) for parameter in parameters]
        products = torch.autograd.grad(first, parameters, grad_outputs=vectors, retain_graph=True)
        fast = {name: p - 0.1 * gradient for (name, p), gradient in zip(model.named_parameters(), first)}
        torch.func.functional_call(model, fast, (2 * x,)).square().mean().backward()
        return first, products, gradients_of(model)

    assert_same(*on_both(script))


def test_a_call_with_computed_parameters_changes_the_statistics_of_the_model():
    def script(device):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).to(device), batch(device)
        first = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
        fast = {name: p - 0.1 * gradient for (name, p), gradient in zip(model.named_parameters(), first)}
        torch.func.functional_call(model, fast, (x,)).square().mean().backward()
        return gradients_of(model), list(model.buffers()), model(2 * x), list(model.buffers())

    assert_same(*on_both(script))


def test_several_tasks_are_adapted_to_before_one_backward():
    """As in MAML; each task's call with computed parameters leaves the calls of the tasks before as they are."""

    def script(device):
        model, losses = critic(device, nn.Tanh), []
        for _ in range(4):
            seen, new = batch(device), batch(device)
            parameters = dict(model.named_parameters())
            loss = functional_call(model, parameters, (seen,)).square().mean()
            found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
            adapted = {name: old - 0.1 * one for (name, old), one in zip(parameters.items(), found)}
            losses.append(functional_call(model, adapted, (new,)).square().mean())
        sum(losses).backward()
        return [*losses, *gradients_of(model)]

    assert_same(*on_both(script))


@pytest.mark.parametrize("change", ["hook", "layer", "layer that trains", "place"])
@pytest.mark.parametrize("ask", ["backward", "grad"])
def test_a_backward_through_a_call_from_before_a_change_is_refused(change, ask):
    """Its gradients would be lost with the parameters that the workers had then."""
    model = critic("cuda")
    first = model(batch("cuda")).mean()
    if change == "hook":
        model[0].register_forward_hook(lambda module, given, result: None)
    elif change == "layer":
        model[1] = nn.ReLU()
    elif change == "layer that trains":  # that of before stays on the workers, beside the model with the new one
        model[-1] = nn.Linear(model[-1].in_features, model[-1].out_features).cuda()
    else:
        model.cpu()
        model.cuda()
    second = model(batch("cuda")).mean()
    with pytest.raises(UnsupportedError, match="from before its hooks, layers or parameters"):
        if ask == "backward":
            (first + second).backward()
        else:
            torch.autograd.grad(first + second, list(model.parameters()))
    model.zero_grad()
    model(batch("cuda")).mean().backward()
    assert all(gradient is not None for gradient in gradients_of(model))


def test_functions_of_torch_autograd_functional():
    def script(device):
        model, x = critic(device), batch(device, 6)

        def energy(row):
            return model(row[None]).sum()

        hessian = torch.autograd.functional.hessian(energy, x)
        jacobian = torch.autograd.functional.jacobian(model, batch(device, 4, 6))
        return hessian, jacobian, torch.autograd.functional.hvp(energy, x, torch.ones(6).to(device))

    assert_same(*on_both(script))


def test_parameters_that_the_script_uses_itself_count_too():
    def script(device):
        model, x = critic(device), batch(device)
        weight = model[0].weight
        (first,) = torch.autograd.grad(model(x).mean() + weight.square().sum(), weight)
        (product,) = torch.autograd.grad(model(x).mean() * weight.square().sum(), weight, create_graph=True)
        product.square().sum().backward()
        return first, product, gradients_of(model)

    assert_same(*on_both(script))


def test_the_gradient_of_one_output_by_another():
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.mapping = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
            self.synthesis = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))

        def forward(self, z):
            style = self.mapping(z)
            return self.synthesis(style), style

    def script(device):  # path length regularisation of StyleGAN2
        torch.manual_seed(0)
        model = Generator().to(device)
        image, style = model(batch(device, 7, 4))
        (gradient,) = torch.autograd.grad((image * batch(device)).sum(), style, create_graph=True)
        lengths = gradient.pow(2).sum(1).sqrt()
        style.retain_grad()
        ((lengths - lengths.mean().detach() - 0.3).pow(2).mean() + image.mean()).backward()
        return gradient, lengths, style.grad, gradients_of(model)

    assert_same(*on_both(script))


def test_derivatives_by_coordinates_that_the_model_returns():
    class Siren(nn.Module):
        """As in SIREN: the coordinates become a leaf inside."""

        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, coordinates):
            coordinates = coordinates.clone().detach().requires_grad_(True)
            return {"model_in": coordinates, "model_out": self.net(coordinates)}

    def script(device):
        torch.manual_seed(0)
        model, trace = Siren().to(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            output = model(torch.rand(9, 2).to(device))
            x, y = output["model_in"], output["model_out"]
            (gradient,) = torch.autograd.grad(y, [x], grad_outputs=torch.ones_like(y), create_graph=True)
            laplacian = 0.0
            for i in range(2):
                along = gradient[..., i]
                (second,) = torch.autograd.grad(along, x, torch.ones_like(along), create_graph=True)
                laplacian = laplacian + second[..., i]
            loss = (gradient.norm(dim=-1) - 1).abs().mean() + laplacian.square().mean() + y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append((loss, gradient, laplacian))
        return trace, model.state_dict()

    assert_same(*on_both(script))


def test_large_gradients_another_model_before_and_rows_fewer_than_devices():
    def script(device):
        torch.manual_seed(0)
        before = nn.Sequential(nn.Linear(3, 784), nn.Tanh()).to(device)
        model = nn.Sequential(nn.Linear(784, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)).to(device)
        (penalty(model, batch(device, 24, 784)) + penalty(model, batch(device, 1, 784))).backward()
        made = before(batch(device, 24, 3))
        (gradient,) = torch.autograd.grad(model(made).tanh().sum(), made, create_graph=True)
        gradient.square().sum().backward()
        return gradient, gradients_of(before), gradients_of(model)

    assert_same(*on_both(script))


@pytest.mark.parametrize("layer", [partial(nn.BatchNorm1d, 16), partial(nn.Dropout, 0.3)], ids=["norm", "dropout"])
def test_rows_that_look_at_each_other_and_random_numbers(layer):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer, self.last = nn.Linear(6, 16), layer(), nn.Linear(16, 1)

        def forward(self, x):
            hidden = checkpoint(lambda h: self.layer(h).tanh(), self.first(x), use_reentrant=False)
            return self.last(hidden)

    def script(device):
        torch.manual_seed(0)
        model = Network().to(device)
        loss = penalty(model, batch(device)) + model(batch(device)).mean()
        loss.backward()
        return loss, gradients_of(model), list(model.buffers())

    assert_same(*on_both(script))


def test_graphs_that_are_kept_and_what_depends_on_nothing():
    def script(device):
        model, x = critic(device), batch(device).requires_grad_()
        y = model(x).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        gradient.pow(2).sum().backward(retain_graph=True)
        gradient.pow(3).sum().backward(retain_graph=True)
        y.backward()
        linear = nn.Linear(6, 1).to(device)
        (constant,) = torch.autograd.grad(linear(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(constant.sum(), x, create_graph=True)
        constant.sum().backward()
        return x.grad, gradients_of(model), gradients_of(linear)

    assert_same(*on_both(script))


class Square(torch.autograd.Function):
    """Makes a tensor on the device in its backward, as losses of scripts do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x * torch.ones(x.shape, device=x.device)


def test_a_function_of_the_script_makes_tensors_in_its_backward():
    def script(device):
        model, x = critic(device), batch(device)
        (found,) = torch.autograd.grad(Square.apply(model(x)).sum(), model[0].weight)
        Square.apply(model(x)).sum().backward()
        return found, gradients_of(model), penalty(lambda y: Square.apply(model(y)), x)

    assert_same(*on_both(script))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["shard=2", "replicate=2,micro_batches=2"])
def test_a_plan_that_cannot_is_named_with_one_that_can(accelerator, plan):
    accelerator(plan)
    model, x = critic("cuda"), batch("cuda").requires_grad_()
    with pytest.raises(UnsupportedError, match=f"create_graph=True under plan='{plan}'") as refused:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert 'plan="replicate=2"' in refused.value.fix
    y = (x**3).sum()  # no model on the way
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second.cpu(), 6 * x.detach().cpu())


def test_gradients_that_parameters_keep_have_no_graph():
    model, x = critic("cuda"), batch("cuda").requires_grad_()
    with pytest.raises(UnsupportedError, match=r"backward\(create_graph=True\)"):
        model(x).sum().backward(create_graph=True)
    with pytest.raises(UnsupportedError, match=r"backward\(create_graph=True\)"):
        model(x).sum().backward(create_graph=True, inputs=list(model.parameters()))
    model(x).sum().backward(create_graph=True, inputs=[x])
    assert x.grad.requires_grad


def test_a_hook_on_an_output_of_which_the_gradient_comes_in_parts():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, x):
            hidden = self.first(x).tanh()
            return self.last(hidden), hidden

    model, x = Two().cuda(), batch("cuda").requires_grad_()
    y, hidden = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    hidden.register_hook(print)
    with pytest.raises(UnsupportedError, match="what a hook waits for"):
        gradient.square().sum().backward()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.attend(x, x, x, need_weights=False)[0]


def test_attention_that_is_not_fused_for_the_call():
    def script(device):
        torch.manual_seed(0)
        model = Attending().to(device)
        with sdpa_kernel(SDPBackend.MATH):  # which the fused kernels have no second derivative of
            loss = penalty(model, batch(device, 4, 3, 6))
        loss.backward()
        return loss, gradients_of(model)

    assert_same(*on_both(script))
