"""`torch.autograd.grad`, gradients of outputs, and what is refused: each compared with one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from one_line_models import OwnTransformer, tiny_llama
from test_one_line_training import assert_same, batches, on_both
from torch import nn
from torch.autograd import forward_ad

pytestmark = pytest.mark.rotating  # one more kind of derivative each


@pytest.fixture(params=["replicate=2", "shard=2"], autouse=True)
def session(request, accelerator):
    return accelerator(request.param)


def small(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    return model, torch.randn(5, 6).to(device), torch.randint(0, 3, (5,)).to(device)


def test_gradients_of_parameters_without_accumulating():
    def script(device):
        model, x, y = small(device)
        F.cross_entropy(model(x), y).backward()
        loss = F.cross_entropy(model(2 * x), y) + model(x).square().mean()
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, [model[2].weight, model[0].bias])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), found):
                parameter -= 0.1 * gradient
        return found, again, [p.grad for p in model.parameters()], model(x)

    assert_same(*on_both(script))


def test_a_kept_gradient_stays_what_it_was():
    def script(device):
        model, x, y = small(device)
        F.cross_entropy(model(x), y).backward()
        kept = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        F.cross_entropy(model(3 * x), y).backward()
        return kept, [parameter.grad for parameter in model.parameters()]

    assert_same(*on_both(script))


def test_gradients_of_inputs_leave_those_of_parameters_alone():
    def script(device):
        model, x, y = small(device)
        x.requires_grad_()
        (first,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        assert all(parameter.grad is None for parameter in model.parameters())
        F.cross_entropy(model(x.detach()), y).backward()
        both = torch.autograd.grad(F.cross_entropy(model(x), y), [x, *model.parameters()])
        F.cross_entropy(model(x), y).backward(inputs=[model[0].weight, x])
        return first, both, x.grad, [p.grad for p in model.parameters()]

    assert_same(*on_both(script))


def test_what_does_not_depend_on_a_tensor_is_said_as_pytorch_says_it():
    def script(device):
        model, x, y = small(device)
        other = nn.Linear(6, 3).to(device)
        loss = F.cross_entropy(model(x), y)
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(loss, [other.weight, model[0].weight], retain_graph=True)
        found = torch.autograd.grad(loss, [other.weight, model[0].weight], allow_unused=True, retain_graph=True)
        assert found[0] is None
        zeros = torch.autograd.grad(loss, [other.weight], materialize_grads=True)
        return found[1], zeros

    assert_same(*on_both(script))


class Timed(nn.Module):
    """The right side of an autonomous ODE: solvers give it the time, and ask for its gradient too."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, time, state):
        return self.net(state)


def test_an_input_that_the_model_does_not_use_has_no_gradient(request):
    is_sharded = "shard" in request.node.callspec.id  # FSDP2 gives every input of a block a gradient, if zeros

    def script(device):
        torch.manual_seed(0)
        model = Timed().to(device)
        time, state = torch.ones(()).to(device).requires_grad_(), torch.randn(5, 6).to(device).requires_grad_()
        kept = []
        for _ in range(3):  # from the second on, what a call gives is known before it runs
            of_time, of_state, *of_parameters = torch.autograd.grad(
                model(time, state).square().sum(), (time, state, *model.parameters()), allow_unused=True
            )
            assert of_time is None or (is_sharded and not of_time.any())
            later = time * 2
            (model(later, state) * 3).sum().backward()
            assert time.grad is None or (is_sharded and not time.grad.any())
            kept += [of_state, *of_parameters, state.grad]
        (time * model(time, state)).sum().backward()
        return [*kept, time.grad]

    assert_same(*on_both(script))


def test_several_losses_in_one_backward_and_a_graph_that_is_kept():
    def script(device):
        model = OwnTransformer().to(device)
        (ids, labels), (more, targets), *_ = batches(device)
        losses = [model(ids, labels)[1], model(more, targets)[1]]
        torch.autograd.backward(losses, retain_graph=True)
        torch.autograd.backward(losses, [torch.tensor(2.0, device=device)] * 2)
        return [parameter.grad for parameter in model.parameters()]

    assert_same(*on_both(script))


def test_the_gradient_of_one_output_that_another_depends_on():
    def script(device):
        model = tiny_llama().to(device)
        ids, labels = batches(device)[0]
        out = model(input_ids=ids, labels=labels, output_hidden_states=True)
        seen = []
        out.hidden_states[1].retain_grad()
        out.logits.register_hook(seen.append)
        out.loss.backward()
        return out.hidden_states[1].grad, seen

    assert_same(*on_both(script))


def test_gradients_of_several_backward_passes_through_one_call():
    def script(device):
        model, x, _ = small(device)
        x.requires_grad_()
        y = model(x)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward(retain_graph=True)
        first, second = (torch.autograd.grad((k * y).sum(), x, retain_graph=True) for k in (1, 3))
        return x.grad, first, second

    assert_same(*on_both(script))


def test_forward_mode():
    def script(device):
        model, x, _ = small(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        direction, trace = torch.zeros_like(x), []
        direction[:, 0] = 1.0
        for _ in range(2):  # an equation of a network and its derivative along one coordinate
            value, along = torch.func.jvp(model, (x,), (direction,))
            with forward_ad.dual_level():
                dual = forward_ad.unpack_dual(model(forward_ad.make_dual(2 * x, direction)))
            jacobian = torch.func.vmap(torch.func.jacfwd(model))(x)
            loss = (along + value).square().mean() + (dual.primal * dual.tangent).mean() + jacobian.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace += [loss, along, dual.tangent, model(x)]
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        directions = {name: torch.ones_like(p) for name, p in parameters.items()}
        outputs = lambda given: torch.func.functional_call(model, given, (x,))  # noqa: E731
        return trace, torch.func.jvp(outputs, (parameters,), (directions,))

    assert_same(*on_both(script))


def test_a_module_that_differentiates_what_it_is_given_by_what_that_was_computed_from(accelerator):
    """The path lengths of StyleGAN2, as a module with an average among its parameters."""
    accelerator("replicate=2", strict=True)

    class PathLengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.average = nn.Parameter(torch.tensor(0.5), requires_grad=False)

        def forward(self, w, x):
            (gradient,) = torch.autograd.grad(
                (x * torch.linspace(0, 1, x.shape[1], device=x.device)).sum(), w, create_graph=True
            )
            lengths = gradient.pow(2).sum(1).sqrt()
            loss = (lengths - self.average).pow(2).mean()
            self.average.mul_(0.9).add_(lengths.mean().detach(), alpha=0.1)
            return loss

    def script(device):
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).to(device)
        mapping, lengths = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device), PathLengths().to(device)
        optimizer, trace = torch.optim.Adam([*generator.parameters(), *mapping.parameters()], lr=1e-2), []
        for _ in range(3):
            w = mapping(torch.randn(6, 4).to(device))
            images = generator(w)
            loss = images.pow(2).mean() + lengths(w, images)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.detach())
        return trace, lengths.average, generator.state_dict(), mapping.state_dict()

    assert_same(*on_both(script))


def test_a_module_that_weighs_its_loss_by_gradients_of_a_parameter_that_it_is_given(accelerator):
    """The adaptive weight of VQGAN: the loss is a submodule of the model, and gets its last layer's weight."""
    accelerator("replicate=2", strict=True)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.discriminator = nn.Linear(6, 1)

        def adaptive_weight(self, loss, adversarial, last):
            of_loss = torch.autograd.grad(loss, last, retain_graph=True)[0]
            of_other = torch.autograd.grad(adversarial, last, retain_graph=True)[0]
            return (of_loss.norm() / (of_other.norm() + 1e-4)).clamp(0.0, 1e4).detach()

        def forward(self, inputs, found, last):
            loss = (inputs - found).abs().mean()
            adversarial = -self.discriminator(found).mean()
            try:
                weight = self.adaptive_weight(loss, adversarial, last)
            except RuntimeError:  # as the original has it, for evaluation without gradients
                assert not self.training
                weight = torch.tensor(0.0)
            return loss + weight * adversarial, weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.loss = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), Loss()

        def forward(self, x):
            return self.decoder(x)

    def script(device):
        torch.manual_seed(0)
        model, trace = Model().to(device), []
        optimizer = torch.optim.Adam(model.decoder.parameters(), lr=1e-2)
        for _ in range(3):
            x = torch.randn(6, 6).to(device)
            loss, weight = model.loss(x, model(x), model.decoder[2].weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace += [loss.detach(), weight]
        return trace, model.state_dict()

    assert_same(*on_both(script))


class Clamped(torch.autograd.Function):
    """A backward that is not linear in the gradient that comes to it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-2, 1e-2)


def test_a_backward_that_clamps_where_every_device_computes_the_whole_batch():
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            if hidden.mean().item() > 100:  # what rows have made decides: the batch is not split
                hidden = 2 * hidden
            return self.last(Clamped.apply(hidden))

    def script(device):
        torch.manual_seed(0)
        model = Deciding().to(device)
        (model(torch.randn(8, 6).to(device)) - 1).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_same(*on_both(script))
