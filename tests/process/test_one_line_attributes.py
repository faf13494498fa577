"""Attributes that a forward sets: a script finds on its model what one device would have put there."""

from __future__ import annotations

import argparse
import copy
import io
import threading
import types
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both, train_step
from torch import Tensor, nn
from torch.nn.utils import prune

from moreh_ap.session.calls import remote_call

pytestmark = pytest.mark.rotating  # one more way to set an attribute each

PLANS = ["replicate=2", "shard=2", "replicate=2,recompute=full"]


class Block(nn.Module):
    """Keeps what one looks at later: weights of attention for every head, and the mean of what it adds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qk, self.mlp = nn.Linear(width, 2 * width), nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.attention: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, dim=-1)
        self.attention = (q @ k.transpose(1, 2)).softmax(-1)
        self.seen = {"largest": self.attention.amax((1, 2)), "length": x.shape[1]}
        return x + self.mlp(self.attention @ x)


class Keeping(nn.Module):
    """A language model as in llama2.c: the loss is an attribute, None where there are no targets."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 11)
        self.last_loss: Tensor | None = None
        self._calls = 0

    @property
    def calls(self) -> int:
        return self._calls

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        self._calls += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if targets is None:
            self.last_loss = None
            return self.head(x[:, [-1]])
        logits = self.head(x)
        self.last_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits


def keeping(device):
    torch.manual_seed(0)
    model = Keeping().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.3)


def tokens(device, rows=6):
    batch = torch.randint(0, 11, (rows, 9))
    return batch[:, :-1].to(device), batch[:, 1:].to(device)


@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_and_more_kept_in_attributes(accelerator, plan):
    def script(device):
        model, optimizer = keeping(device)
        trace = []
        model.eval()
        with torch.no_grad():  # evaluated before it is trained: there the loss was None, and is None
            model(tokens(device)[0])
        trace.append(torch.tensor(model.last_loss is None))
        model.train()
        for step in range(4):
            x, y = tokens(device, rows=6 - step)
            logits = model(x, y)
            loss = model.last_loss + 0 * logits.mean() if step % 2 else model.last_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace += [loss.detach(), model.blocks[1].attention.detach(), model.blocks[0].seen["largest"].detach()]
            trace += [torch.tensor(model.blocks[0].seen["length"]), torch.tensor(model.calls)]
        with torch.no_grad():
            model(tokens(device)[0])
        return [*trace, torch.tensor(model.last_loss is None), *model.parameters()]

    accelerator(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class Watching(nn.Module):
    """The style transfer tutorial: layers that pass their input on, and keep a loss."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target.detach()

    def forward(self, x: Tensor) -> Tensor:
        self.loss = F.mse_loss(x, self.target)
        return x


def test_losses_of_layers_without_the_output(accelerator):
    def script(device):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).to(device).eval()
        style = torch.rand(1, 3, 8, 8).to(device)
        with torch.no_grad():
            first, last = layers[0](style), layers(style)
        watched = [Watching(first), Watching(last)]
        model = nn.Sequential(layers[0], watched[0], layers[1], layers[2], watched[1]).requires_grad_(False)
        image = torch.rand(1, 3, 8, 8).to(device).requires_grad_()
        optimizer = torch.optim.LBFGS([image], max_iter=3)
        trace = []

        def closure():
            optimizer.zero_grad()
            model(image)
            loss = sum(layer.loss for layer in watched)
            loss.backward()
            trace.append(loss.detach())
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return [*trace, image.detach()]

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class Experts(nn.Module):
    """Mixture of experts: what balances the load looks at the whole batch, and is added to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        share = F.one_hot(weights.argmax(-1), 3).float().mean(0)
        self.balance = 3 * (share * weights.mean(0)).sum()
        return sum(weights[:, [n]] * expert(x) for n, expert in enumerate(self.experts))


@pytest.mark.parametrize("plan", PLANS[:2])
def test_what_depends_on_the_whole_batch_does_so_in_an_attribute(accelerator, plan):
    def script(device):
        torch.manual_seed(0)
        model = nn.Sequential(Experts(), nn.Tanh(), Experts()).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        trace = []
        for _ in range(3):
            x = torch.randn(6, 6).to(device)
            loss = (model(x) - x).square().mean()
            loss = loss + 0.1 * sum(part.balance for part in model if isinstance(part, Experts))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.detach())
        return [*trace, *model.parameters()]

    accelerator(plan)
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class Collecting(nn.Module):
    """A forward that gathers what it sees in a list which the script empties, and a running mean in a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen, self.mean = nn.Linear(4, 4), [], None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.seen.append(x.detach())
        batch = x.detach().mean(0)
        self.mean = batch if self.mean is None else 0.9 * self.mean + 0.1 * batch
        return x.sum(1)


def test_lists_that_the_script_empties_and_a_state_of_the_whole_batch(accelerator):
    def script(device):
        torch.manual_seed(0)
        model, trace = Collecting().to(device), []
        for step in range(5):
            model(torch.randn(6, 4).to(device)).sum().backward()
            trace += [torch.tensor(len(model.seen)), model.seen[-1], model.mean]
            if step % 2:
                model.seen.clear()
        model.mean = torch.zeros(4).to(device)
        model(torch.ones(6, 4).to(device))
        return [*trace, model.mean, *(parameter.grad for parameter in model.parameters())]

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


def test_gradients_through_attributes_and_a_model_that_is_saved_copied_and_changed(accelerator):
    def script(device):
        torch.manual_seed(0)
        model, _ = keeping(device)
        x, y = tokens(device)
        logits = model(x, y)
        block = model.blocks[0]
        block.attention.retain_grad()
        seen: list[Tensor] = []
        logits.register_hook(seen.append)
        (model.last_loss + 0.3 * block.attention.square().sum()).backward()
        trace = [block.attention.grad, *seen, *(parameter.grad for parameter in model.parameters())]
        model.zero_grad()
        with torch.no_grad():
            model(x, y)
        whole = io.BytesIO()
        torch.save(model, whole)
        whole.seek(0)
        loaded, copied = torch.load(whole, weights_only=False), copy.deepcopy(model)
        model.head = nn.Linear(16, 11).to(device)
        for other in (model, loaded, copied):
            other(x, y).sum().backward()
            trace += [other.last_loss.detach(), other.embed.weight.grad]
        return trace

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class Now(nn.Module):
    """Attributes that cannot come to the script, or come in some calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.step = nn.Linear(4, 4), 0

    def forward(self, x: Tensor, look: Tensor) -> Tensor:
        x = self.inner(x)
        if look.max().item() > 0:
            self.looked = x.detach()
        self.norm = threading.Lock()  # cannot be copied to another process
        return x


def test_what_does_not_come_to_the_script_is_named_once(accelerator):
    accelerator("replicate=2")
    model, x = Now().cuda(), torch.ones(4, 4, device="cuda")
    with pytest.warns(UserWarning, match=r"sets norm in the workers"):
        model(x, torch.zeros(4))
    model(x, torch.zeros(4))
    with pytest.warns(UserWarning, match=r"sets looked in the workers"):
        model(x, torch.ones(4)).sum().item()
        model(x, torch.ones(4)).sum().item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, torch.ones(4)).sum().item()
        result = model(x, torch.ones(()))  # calls with a number that decides are a kind, and what they set comes
    torch.testing.assert_close(model.looked, result.detach())


@pytest.mark.parametrize("plan", ["micro_batches=2,replicate=2", "tensor=2"])
def test_under_plans_that_divide_a_forward_attributes_stay_in_the_workers(accelerator, plan):
    accelerator(plan)
    model, _ = keeping("cuda")
    x, y = tokens("cuda")
    with pytest.warns(UserWarning, match=r"sets .*last_loss.* in the workers"):
        for _ in range(3):  # pieces of a batch run when backward asks for them, and answers come later
            model(x, y).sum().backward()
            model.head.bias.grad.sum().item()
    assert model.last_loss is None


class Cell(nn.Module):
    """A recurrent layer that keeps its state, one step a call: what it learns goes through all of them."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.inner, self.across, self.keeps, self.state = nn.Linear(4, 5), nn.Linear(5, 5), keeps, None

    def forward(self, x: Tensor) -> Tensor:
        before = self.state
        x = self.inner(x)
        if before is not None:
            x = x + self.across(before).tanh()
        self.state = x if self.keeps == "rows" else x.mean(0)
        return x.square()


@pytest.mark.parametrize("plan", PLANS[:2])
@pytest.mark.parametrize("keeps", ["rows", "mean"])
def test_a_state_that_the_next_call_reads(accelerator, plan, keeps):
    def script(device):
        torch.manual_seed(0)
        model = Cell(keeps).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trace = []
        for _ in range(3):
            loss = sum(model(torch.randn(6, 4).to(device)).mean() for _ in range(3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace += [loss.detach(), model.state.detach()]
            model.state = model.state.detach()
        return [*trace, *model.parameters()]

    accelerator(plan)
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class TwoSteps(nn.Module):
    """One part keeps what another part, called by itself, reads."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = Encoder(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.cat([x, self.encode.context], 1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.context = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> None:
        self.context = self.inner(x).tanh()


def test_what_one_part_keeps_is_read_by_another_call(accelerator):
    def script(device):
        torch.manual_seed(0)
        model, trace = TwoSteps().to(device), []
        for _ in range(3):
            model.encode(torch.randn(6, 4).to(device))
            loss = model(torch.randn(6, 4).to(device)).square().sum(1).mean()
            model.zero_grad()
            loss.backward()
            trace += [loss.detach(), *(parameter.grad for parameter in model.parameters())]
        return trace

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class MovingMean(nn.Module):
    """Keeps a tensor at first, and a number from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean = nn.Linear(4, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        now = self.net(x).mean().detach()
        kept = self.mean.item() if isinstance(self.mean, Tensor) else self.mean
        self.mean = now if kept == 0 else 0.1 * now.item() + 0.9 * kept
        return (self.net(x) - self.mean).square().mean()


def test_a_state_that_becomes_a_number(accelerator):
    def script(device):
        torch.manual_seed(0)
        model, trace = MovingMean().to(device), []
        for _ in range(4):
            loss = model(torch.randn(6, 4).to(device))
            model.zero_grad()
            loss.backward()
            trace += [loss.detach(), model.net.weight.grad, torch.as_tensor(model.mean)]
        return trace

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class CachedAttention(nn.Module):
    """As in the reference code of Llama: keys are written into a tensor that the module keeps, which is no buffer."""

    def __init__(self, width: int = 16, max_rows: int = 6, max_length: int = 12) -> None:
        super().__init__()
        self.qk, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.cache = torch.zeros(max_rows, max_length, width)

    def forward(self, x: Tensor, start: int) -> Tensor:
        rows, length, _ = x.shape
        q, k = self.qk(x).chunk(2, dim=-1)
        self.cache = self.cache.to(q)
        self.cache[:rows, start : start + length] = k
        keys = self.cache[:rows, : start + length]
        return self.out((q @ keys.transpose(1, 2)).softmax(-1) @ keys)


class ReferenceDecoder(nn.Module):
    """Its `forward` is called by its name, so that every part is a call of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(11, 16), CachedAttention()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start: int) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x + self.attention(x, start)))


@pytest.mark.parametrize("rows", [2, 3])
def test_a_cache_that_a_forward_writes_in_place_is_that_of_one_device(accelerator, rows):
    accelerator("replicate=2")

    def script(device):
        torch.manual_seed(0)
        model = ReferenceDecoder().to(device)
        model.attention.cache = model.attention.cache.to(device)
        tokens, found = torch.arange(3 * rows, device=device).view(rows, 3) % 11, []
        for start in (0, 3, 4, 5):
            logits = model.forward(tokens[:, start:], start)
            found.append(logits[:, -1].cpu())
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        return {"logits": torch.stack(found), "tokens": tokens.cpu()}

    assert_same(*on_both(script))


class DroppedWeight(nn.Module):
    """An LSTM whose recurrent weight is computed anew in every forward and put among its parameters, as fastai does."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(11, width), nn.LSTM(width, width), nn.Linear(width, 11)
        self.raw = nn.Parameter(self.lstm.weight_hh_l0.detach())

    def forward(self, tokens: Tensor) -> Tensor:
        self.lstm._parameters["weight_hh_l0"] = F.dropout(self.raw, 0.5, self.training)
        self.lstm._flat_weights = [getattr(self.lstm, name) for name in self.lstm._flat_weights_names]
        return self.head(self.lstm(self.embed(tokens))[0])


def test_a_weight_computed_by_forward_among_the_parameters_trains_what_it_was_computed_from(accelerator, capfd):
    accelerator("replicate=2")

    def script(device):
        model, losses = DroppedWeight().to(device), []
        del model.lstm._parameters["weight_hh_l0"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(5):
            model.train(step != 2)
            tokens = torch.randint(11, (6, 4)).to(device)
            loss = F.cross_entropy(model(tokens[:-1]).flatten(0, 1), tokens[1:].flatten())
            optimizer.zero_grad()
            if model.training:
                loss.backward()
                optimizer.step()
            losses.append(loss.detach().cpu())
        return {"losses": torch.stack(losses), "raw": model.raw.detach().cpu()}

    assert_same(*on_both(script))
    assert "UserWarning" not in capfd.readouterr().err  # of the gradient of what is no leaf


class Criterion:
    """A loss in an object of its own: made by the model at its first call, weakened by the script after an epoch."""

    def __init__(self, model: nn.Module) -> None:
        self.head, self.device = model.head, next(model.parameters()).device
        self.weight, self.scale = 1.0, torch.full((3,), 0.5, device=self.device)

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        return self.weight * ((scores - targets) * self.scale).square().mean()

    def update(self) -> None:
        self.weight /= 2


class Lenient(dict):
    """A dictionary with attributes, as repositories write it: what it has not is a KeyError."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class ScaledLayer(nn.Module):
    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args, self.layer = args, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.args.gain + self.args.nested.shift


class Configured(nn.Module):
    def __init__(self, args: Any, options: Lenient) -> None:
        super().__init__()
        self.args, self.options = args, options
        self.layers, self.power = nn.Sequential(ScaledLayer(args), ScaledLayer(args)), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.options.scale * self.power


@pytest.mark.parametrize("plan", PLANS[:2])
def test_what_the_script_sets_on_objects_that_a_model_keeps_counts_in_the_next_call(accelerator, plan):
    """Annealing by ``args.gain *= 0.5``, settings that several layers share, and an attribute that is deleted."""
    accelerator(plan)

    def script(device):
        torch.manual_seed(0)
        args = argparse.Namespace(gain=1.0, step=0, nested=types.SimpleNamespace(shift=0.0))
        model, sums = Configured(args, Lenient(scale=1.0)).to(device), []
        x = torch.randn(6, 4).to(device)

        def call() -> None:
            sums.append(model(x).square().mean())
            sums[-1].backward()
            args.step += 1

        call()
        args.gain = 0.5
        call()
        args.nested.shift = 2.0
        call()
        args.nested = types.SimpleNamespace(shift=-1.0)
        call()
        model.options.scale = 0.1
        call()
        model.args = model.layers[0].args = argparse.Namespace(gain=3.0, nested=args.nested)
        args.gain = 7.0
        call()
        type(model).power = 5.0
        del model.power
        call()
        del type(model).power
        return torch.stack(sums).detach(), [parameter.grad for parameter in model.parameters()]

    assert_same(*on_both(script))


class MakesItsCriterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        if getattr(self, "criterion", None) is None:
            self.criterion = Criterion(self)
        return self.criterion(self.head(x), targets)


@pytest.mark.parametrize("plan", PLANS[:2])
def test_an_object_that_a_forward_has_set_is_found_and_what_the_script_does_to_it_counts(accelerator, plan):
    accelerator(plan)

    def script(device):
        torch.manual_seed(0)
        model, losses = MakesItsCriterion().to(device), []
        x, targets = torch.randn(6, 4).to(device), torch.randn(6, 3).to(device)
        for _ in range(3):
            losses.append(model(x, targets))
            losses[-1].backward()
            assert model.criterion.head is model.head and model.criterion.scale.device.type == torch.device(device).type
            assert model.criterion.device.type == torch.device(device).type
            losses.append(model.criterion(model.head(x), targets).detach())
            model.criterion.update()
        return torch.stack(losses).detach(), [parameter.grad for parameter in model.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(*on_both(script))


class Filled(nn.Module):
    """A hook of the script, and the forward, fill a dict; the forward makes a list anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)
        self.features: dict[str, Tensor] = {}
        self.filled: dict[str, Tensor] = {}
        self.anew: list[Tensor] = []
        self.body.register_forward_hook(lambda module, given, result: self.features.update(body=result))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        self.filled["hidden"] = hidden
        self.anew = [hidden.detach().mean(1)]
        return self.head(hidden)


@pytest.mark.parametrize("plan", PLANS[:2])
def test_other_names_of_a_dict_that_is_filled_stay_names_of_it(plan, accelerator):
    accelerator(plan, strict=True)

    def script(device):
        torch.manual_seed(0)
        model = Filled().to(device)
        features, filled, anew = model.features, model.filled, model.anew
        trace = []
        for _ in range(3):
            scores = model(torch.randn(6, 6).to(device))
            loss = scores.square().mean() + features["body"].square().mean() + filled["hidden"].abs().mean()
            model.zero_grad()
            loss.backward()
            trace += [loss.detach(), model.anew[0], *(parameter.grad.clone() for parameter in model.parameters())]
        assert features is model.features and filled is model.filled and anew == [] and anew is not model.anew
        return trace

    assert_same(*on_both(script))


class Searched(nn.Module):
    """Weights of operations that are searched for, as DARTS keeps them: tensors that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(6, 4)
        self.alphas: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.alphas.softmax(-1)
        return self.last(sum(weight * operation(x) for weight, operation in zip(weights, self.operations)))


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
@pytest.mark.parametrize("is_set_late", [False, True])
def test_a_tensor_that_the_script_trains_gets_its_gradient(accelerator, capsys, plan, is_set_late):
    def script(device):
        torch.manual_seed(0)
        model = Searched()
        alphas = (0.1 * torch.randn(3)).to(device).requires_grad_()
        model.alphas = torch.zeros(3) if is_set_late else alphas
        model.to(device)
        if is_set_late:
            model.alphas = torch.zeros(3).to(device)
            model(torch.randn(2, 6).to(device))
            model.alphas = alphas
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([alphas], lr=0.5)]
        trace = []
        for step in range(4):
            loss = F.cross_entropy(model(torch.randn(8, 6).to(device)), torch.randint(4, (8,)).to(device))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            optimizers[step % 2].step()
            trace += [loss.detach(), alphas.grad.clone(), alphas.detach().clone()]
        return trace

    accelerator(plan)
    assert_same(*on_both(script))
    assert "computes the whole batch" not in capsys.readouterr().out


class Memory(nn.Module):
    """A memory that is set for all rows and written in each step; the step before it is read first."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self.read = nn.Linear(6 + 4, 4), nn.Linear(4, 3)
        self.start = nn.Parameter(torch.randn(2, 4))

    def begin(self, rows: int) -> None:
        self.before = self.start.new_zeros(rows, 4)
        self.memory = self.start.clone().repeat(rows, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        written = torch.tanh(self.write(torch.cat([x, self.before], dim=1)))
        self.memory = 0.5 * self.memory + written[:, None]
        self.before = self.memory.mean(1)
        return self.read(self.before)


def test_a_state_that_only_the_whole_batch_can_read_is_passed_with_its_gradient(accelerator):
    def script(device):
        torch.manual_seed(0)
        model = Memory().to(device)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            model.begin(5)
            loss = sum(model(torch.randn(5, 6).to(device)).square().mean() for _ in range(3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, [parameter.grad for parameter in model.parameters()]

    accelerator("replicate=2")
    assert_same(*on_both(script))


class Decoder(nn.Module):
    """Puts what its head gives into a list that the whole network has, as MONAI's DynUNet does."""

    def __init__(self, heads: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.heads = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 1), heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu()
        self.heads[0] = self.head(y)
        return y


class DeeplySupervised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = [torch.rand(1)]
        self.decoder, self.out = Decoder(self.heads), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(self.decoder(x))
        return torch.stack([out, *self.heads], 1)


@pytest.mark.parametrize("plan", PLANS[:2])
def test_a_list_that_two_parts_share_stays_shared(accelerator, capsys, plan):
    def script(device):
        torch.manual_seed(0)
        model, losses = DeeplySupervised().to(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            targets = torch.randint(0, 2, (4, 6, 6)).to(device)
            loss = sum(F.cross_entropy(one, targets) for one in model(torch.randn(4, 1, 6, 6).to(device)).unbind(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert model.heads is model.decoder.heads
        return losses, model.state_dict()

    accelerator(plan)
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert "computes the whole batch" not in capsys.readouterr().out


class Leaky(nn.Module):
    """A neuron whose membrane potential is a buffer, as in snntorch with ``init_hidden=True``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("potential", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.potential.shape != x.shape:
            self.potential = torch.zeros_like(x, device=self.potential.device)
        self.potential = 0.9 * self.potential + x
        return torch.tanh(self.potential)


@pytest.mark.parametrize("plan", PLANS[:2])
def test_gradients_flow_through_a_buffer_to_the_forward_that_set_it(accelerator, capsys, plan):
    def script(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), Leaky(), nn.Linear(8, 3)).to(device)
        optimizer, trace, neuron = torch.optim.SGD(model.parameters(), lr=0.1), [], model[1]
        for _ in range(4):
            neuron.potential = torch.zeros_like(neuron.potential, device=neuron.potential.device)
            loss = model(torch.randn(8, 6).to(device)).square().mean()
            loss = loss + model(torch.randn(8, 6).to(device)).square().mean() + neuron.potential.square().mean()
            optimizer.zero_grad()
            loss.backward()
            trace += [loss, *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            neuron.potential = neuron.potential.detach()
            with torch.no_grad():
                trace += [model(torch.randn(8, 6).to(device)), neuron.potential]
        return trace

    accelerator(plan)
    assert_same(*on_both(script))


class SpectralNorm(nn.Linear):
    """As in BigGAN-PyTorch: the singular value is written into a buffer, for logs, with the graph that it has."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("u", torch.randn(1, sizes[1]))
        self.register_buffer("value", torch.ones(1))

    def forward(self, x):
        with torch.no_grad():
            v = F.normalize(self.u @ self.weight)
            u = F.normalize(v @ self.weight.T)
            if self.training:
                self.u[:] = u
        value = (v @ self.weight.T @ u.T).squeeze()
        if self.training:
            self.value[:] = value
        return F.linear(x, self.weight / value, self.bias)


def test_a_result_that_a_forward_writes_into_a_buffer_with_its_graph(accelerator):
    accelerator("replicate=2", strict=True)

    def script(device):
        torch.manual_seed(0)
        model = nn.Sequential(SpectralNorm(6, 8), nn.ReLU(), SpectralNorm(8, 1)).to(device)
        optimizer, trace = torch.optim.Adam(model.parameters(), lr=1e-2), []
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                loss = model(torch.randn(6, 6).to(device)).relu().mean()
                loss.backward()
                trace.append(loss.detach())
            optimizer.step()
        return trace, model.state_dict()

    assert_same(*on_both(script))


class LooksOnce(nn.Module):
    """Looks at its labels in the first call alone, as losses of sentence-transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.has_looked = False

    def forward(self, first: Tensor, second: Tensor, labels: Tensor) -> Tensor:
        if not self.has_looked:
            self.has_looked = True
            if labels.gt(1).any().item():
                raise ValueError("labels are 0 or 1")
        distances = 1 - F.cosine_similarity(self.encoder(first), self.encoder(second))
        apart = F.relu(0.5 - distances)
        return 0.5 * torch.where(labels == 1, distances, apart).pow(2).mean()


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_an_attribute_that_the_first_call_alone_sets(accelerator, plan):
    accelerator(plan, strict=True)

    def script(device):
        torch.manual_seed(0)
        model = LooksOnce().to(device)
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.3), []
        for _ in range(4):
            rows = torch.randn(6, 4).to(device), torch.randn(6, 4).to(device), torch.randint(2, (6,)).to(device)
            train_step(trace, model, optimizer, model(*rows))
        assert model.has_looked
        return trace, list(model.parameters())

    assert_same(*on_both(script))


class SetsLate(nn.Linear):
    """Sets an empty list in its third call alone."""

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        if int(step[0]) == 2:
            self.terms: list[Tensor] = []
        return super().forward(x).square().mean()


def test_an_empty_list_that_a_later_call_alone_sets(accelerator):
    accelerator("replicate=2", strict=True)

    def script(device):
        torch.manual_seed(0)
        model = SetsLate(4, 8).to(device)
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(4):
            rows = torch.randn(8, 4).to(device), torch.full((8,), step)
            train_step(trace, model, optimizer, model(*rows))
        return trace

    assert_same(*on_both(script))


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_weights_that_hooks_of_pytorch_compute_are_found_in_a_loss(accelerator, plan):
    """They stayed what they were when the model moved: a penalty on them had no gradient, and a sum was an old one."""
    accelerator(plan, strict=True)

    def script(device):
        torch.manual_seed(0)
        layers = nn.utils.spectral_norm(nn.Linear(6, 8)), nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 3)
        prune.l1_unstructured(layers[2], "weight", 0.4)
        model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).to(device)
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            loss = F.cross_entropy(model(torch.randn(8, 6).to(device)), torch.randint(3, (8,)).to(device))
            train_step(trace, model, optimizer, loss + 0.1 * sum(layer.weight.square().sum() for layer in layers))
        with torch.no_grad():
            trace += [model.eval()(torch.randn(4, 6).to(device)), *(layer.weight.sum() for layer in layers)]
        return trace, model.state_dict()

    assert_same(*on_both(script))


def test_a_model_whose_weights_hooks_compute_is_not_waited_for(accelerator, monkeypatch):
    """What a call returns is learnt from the first one; of later ones it is known before the workers answer."""
    accelerator("replicate=2", strict=True)
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 1)).to("cuda")
    optimizer, learnt = torch.optim.SGD(model.parameters(), lr=0.1), []
    learn = remote_call.learn_structure
    monkeypatch.setattr(
        remote_call, "learn_structure", lambda *given, **named: (learnt.append(given), learn(*given, **named))[1]
    )
    for _ in range(4):
        loss = model(torch.randn(8, 6).to("cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert len(learnt) == 1, "a call is waited for each time"
