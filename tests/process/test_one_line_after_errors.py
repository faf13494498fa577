"""After an error in a worker: one clear error for each value that is missing, and a script or notebook that goes on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rotating import rotating_from
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn

from moreh_ap.errors import NotComputedError

WORDS, CLASSES = 10, 20000
UNKNOWN = 99
MISSING = "This value was not computed: the workers had raised IndexError: index out of range"


class Words(nn.Module):
    """Raises an error for words that it does not know."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.words, self.dropout, self.last = nn.Embedding(WORDS, 8), nn.Dropout(0.5), nn.Linear(8, classes)
        self.gain = 1.0

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.last(self.dropout(self.words(ids_BT).mean(1)) * self.gain)


class WithLoss(Words):
    def forward(self, ids_BT: Tensor, labels_B: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(ids_BT), labels_B)


@pytest.fixture(params=rotating_from(1, ["replicate=2", "shard=2"]), autouse=True)
def session(request, accelerator):
    return accelerator(request.param)


def batch(device, word=None):
    ids_BT = torch.randint(0, WORDS, (8, 3)) if word is None else torch.full((8, 3), word)
    return ids_BT.to(device), torch.randint(0, 4, (8,)).to(device)


def step(model, optimizer, device, word=None):
    loss = model(*batch(device, word))
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
    optimizer.step()
    return loss, norm


def test_training_goes_on_as_on_one_device_with_what_was_set_behind_the_error():
    """One device raises the error at the call, and is told of the settings before; workers raise it later."""

    def script(device):
        model = WithLoss().to(device)
        model.dropout.p = 0.0
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        trace = [*step(model, optimizer, device), *step(model, optimizer, device)]

        def change():
            schedule.step()
            model.gain = 3.0
            model.words.weight.requires_grad_(False)
            model.eval()

        torch.manual_seed(1)
        with pytest.raises(IndexError):
            if device == "cpu":
                change()
            loss = model(*batch(device, UNKNOWN))
            change()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
        trace.append(model.words.weight.grad)
        torch.manual_seed(2)
        trace += [*step(model, optimizer, device), *step(model, optimizer, device)]
        model.train()
        trace += step(model, optimizer, device)
        return trace, model.state_dict(), optimizer.state_dict()["state"]

    assert_same(*on_both(script))


def test_what_was_not_computed_says_so_wherever_it_is_used():
    model, other = Words(CLASSES).cuda().eval(), nn.Linear(CLASSES, 2).cuda()
    for _ in range(2):
        ids, labels = batch("cuda")
        F.cross_entropy(model(ids), labels).backward()
        other(model(ids)).sum().backward()
    ids, labels = batch("cuda", UNKNOWN)
    logits = model(ids)
    with pytest.raises(IndexError):
        torch.cuda.synchronize()
    uses = [
        lambda: logits.sum().item(),
        lambda: logits.softmax(-1).cpu(),
        lambda: F.cross_entropy(logits, labels).item(),
        lambda: logits.sum().backward(),
        lambda: other(logits).sum().item(),
        lambda: print(logits),
    ]
    for use in uses:
        with pytest.raises(NotComputedError, match=MISSING):
            use()
        torch.cuda.synchronize()
    ids, labels = batch("cuda")
    assert F.cross_entropy(model(ids), labels).item() > 0


def test_values_behind_the_error_say_so_after_it_was_raised():
    model = WithLoss().cuda().eval()  # a call that draws random numbers waits, and raises its error itself
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer, "cuda"), step(model, optimizer, "cuda")
    torch.cuda.synchronize()
    held = []
    with pytest.raises(IndexError):
        held.append(model(*batch("cuda", UNKNOWN)))
        held += [held[0] * 2 + 1]
        held[0].item()
    for value in held:
        with pytest.raises(NotComputedError, match=MISSING) as raised:
            value.item()
        assert isinstance(raised.value.__cause__, IndexError)
    with pytest.raises(NotComputedError, match=MISSING):
        held[0].backward()
    assert step(model, optimizer, "cuda")[0].item() > 0


def test_an_optimizer_and_a_model_that_come_behind_the_error_are_made():
    model, second = WithLoss().cuda().eval(), WithLoss().cuda().eval()
    for _ in range(2):
        model(*batch("cuda")).backward()
    model.zero_grad()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with pytest.raises(IndexError):
        loss = model(*batch("cuda", UNKNOWN))
        loss.backward()
        optimizer.step()
        loss.item()
    assert all(step(model, optimizer, "cuda")[0].item() > 0 for _ in range(3))
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(IndexError):
        loss = model(*batch("cuda", UNKNOWN))
        step(second, torch.optim.Adam(second.parameters()), "cuda")
        loss.item()
    optimizer = torch.optim.Adam(second.parameters())
    assert all(step(second, optimizer, "cuda")[0].item() > 0 for _ in range(3))


class RaisesInBackward(torch.autograd.Function):
    """Passes on what it is given, and no negative gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if gradient.amax() > 100:
            raise OverflowError("the gradient is too large")
        return gradient


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        return self.blocks[1](RaisesInBackward.apply(self.blocks[0](x)))


def test_a_backward_behind_one_that_raised_has_its_gradients():
    """Where parameters are sharded, no later backward reduced any."""

    def script(device):
        torch.manual_seed(0)
        model, trace = Guarded().to(device), []
        for scale in (1, 1e6, 1):
            loss = model(torch.ones(4, 4).to(device)).sum() * scale
            model.zero_grad()
            if scale > 1:
                with pytest.raises((OverflowError, RuntimeError)):
                    loss.backward()
                    model.blocks[0][0].weight.grad.sum().item()
            else:
                loss.backward()
                trace += [parameter.grad.clone() for parameter in model.parameters()]
        return trace

    assert_same(*on_both(script))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def backward_from(self, sums, gradients):
        """Returns the inputs of the block, and their gradients, from its outputs and theirs."""
        with torch.enable_grad():
            y = sums[0].detach().requires_grad_()
            added = self.second(y).tanh()
            added.backward(gradients[1])
        right = (sums[1] - added).detach()
        left_gradient = gradients[0] + y.grad
        with torch.enable_grad():
            x = right.requires_grad_()
            other = self.first(x).tanh()
            other.backward(left_gradient)
        return (sums[0] - other.detach(), right.detach()), (left_gradient, gradients[1] + x.grad)

    def forward(self, left, right):
        with torch.no_grad():
            left = left + self.first(right).tanh()
            return left, right + self.second(left).tanh()


class Reversible(torch.autograd.Function):
    """As in Reformer: the backward computes again what the forward has not kept."""

    @staticmethod
    def forward(ctx, left, right, blocks):
        for block in blocks:
            left, right = block(left, right)
        ctx.kept, ctx.blocks = (left.detach(), right.detach()), blocks
        return left, right

    @staticmethod
    def backward(ctx, *gradients):
        sums = ctx.kept
        for block in reversed(ctx.blocks):
            sums, gradients = block.backward_from(sums, gradients)
        return *gradients, None


class ReversibleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, 8), nn.ModuleList(Half() for _ in range(2))

    def forward(self, x):
        return torch.cat(Reversible.apply(*self.embed(x).chunk(2, -1), self.blocks), -1)


def test_reversible_layers_have_their_gradients():
    """A trial of their backward raises where blocks are sharded, which then join the rest of the model."""

    def script(device):
        torch.manual_seed(0)
        model, trace = ReversibleNet().to(device), []
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(6, 4).to(device)).square().mean().backward()
            trace += [parameter.grad.clone() for parameter in model.parameters()]
        return trace

    assert_same(*on_both(script))
