"""Models that keep modules, or other tensors, beside their own parameters: stacked networks, kept aliases."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from moreh_ap.errors import UnsupportedError
from moreh_ap.settings import Options

pytestmark = pytest.mark.rotating  # one more model or plan each

WHOLE = "Every device computes the whole batch"


@pytest.fixture(params=["replicate=2", "shard=2"])
def session(request, accelerator):
    return accelerator(request.param)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class StackedNetworks(nn.Module):
    """Several networks at once by `vmap`, as losses of TorchRL have them: the parameters are stacked, and the network
    through which they go is kept beside them with parameters that nobody trains."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        networks = [network() for _ in range(count)]
        stacked, _ = stack_module_state(networks)
        self.stacked = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(one) for name, one in stacked.items()})
        self.names = list(stacked)
        self.__dict__["network"] = networks[0]

    def forward(self, x_BF: Tensor, y_B: Tensor) -> tuple[Tensor, Tensor]:
        params = {name: self.stacked[name.replace(".", "_")] for name in self.names}
        values_NB = torch.vmap(lambda one: functional_call(self.network, one, (x_BF,)).squeeze(-1))(params)
        return F.mse_loss(values_NB, y_B.expand_as(values_NB), reduction="none").sum(0).mean(), values_NB.min(0)[0]


def move_all(model: nn.Module, device: str) -> nn.Module:
    """Moves a model and the network that it keeps, as a script that moves its networks first."""
    model.network.to(device)
    return model.to(device)


def train(model: nn.Module, device: str, steps: int = 3) -> list:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = []
    for step in range(steps):
        draws = torch.Generator().manual_seed(step)
        x_BF, y_B = torch.randn(5, 6, generator=draws), torch.randn(5, generator=draws)
        loss, result = model(x_BF.to(device), y_B.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trace.append((loss.detach(), result.detach()))
    return [*trace, [param.detach() for param in model.parameters()]]


def test_stacked_networks_are_trained_through_a_network_that_is_none_of_the_models(session, capsys):
    assert_same(*on_both(lambda device: train(move_all(StackedNetworks(), device), device)))
    assert WHOLE not in capsys.readouterr().out


class UsesTheNetworkItself(StackedNetworks):
    def forward(self, x_BF: Tensor, y_B: Tensor) -> tuple[Tensor, Tensor]:
        values_B = self.network(x_BF).squeeze(-1)
        return F.mse_loss(values_B, y_B), values_B


def test_what_computes_with_parameters_that_are_none_of_the_models_is_told(session):
    model = move_all(UsesTheNetworkItself(), "cuda")
    with pytest.raises(UnsupportedError, match=r"forward uses a Sequential.*none of the model's"):
        train(model, "cuda")


class KeptAlias(nn.Module):
    """Pulls its weight towards what it was, which it reads by another tensor of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.kept: list[Tensor] = []

    def keep(self) -> nn.Module:
        self.kept = [self.layer.weight.detach()]
        return self

    def forward(self, x_BF: Tensor, y_B: Tensor) -> tuple[Tensor, Tensor]:
        values_B = (self.layer(x_BF) + x_BF @ self.kept[0].T).squeeze(-1)
        return F.mse_loss(values_B, y_B), values_B


class CachedAlias(KeptAlias):
    """Makes the other tensor in its first forward, and goes on with it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, list[Tensor]] = {}

    def forward(self, x_BF: Tensor, y_B: Tensor) -> tuple[Tensor, Tensor]:
        if "kept" not in self.cache:
            self.cache["kept"] = [self.layer.weight.detach()]
        self.kept = self.cache["kept"]
        return super().forward(x_BF, y_B)


@pytest.mark.parametrize("plan", ["replicate=2", "replicate=3"])
@pytest.mark.parametrize("kind", [KeptAlias, CachedAlias])
def test_another_tensor_of_the_memory_of_a_parameter_follows_its_steps(accelerator, plan, kind):
    accelerator(plan)
    made = kind()
    assert_same(*on_both(lambda device: train(copy.deepcopy(made).to(device).keep(), device)))


def test_such_a_tensor_is_refused_where_the_parameter_is_split(accelerator):
    accelerator("shard=2")
    with pytest.raises(UnsupportedError, match=r"has the memory of layer.weight, which plan='shard=2' splits"):
        train(KeptAlias().to("cuda").keep(), "cuda")


class OddModule(nn.Linear):
    """A module whose `==` gives no truth value, as those of TensorDict."""

    __hash__ = nn.Module.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("Converting a tensordict to boolean value is not permitted")


@pytest.mark.parametrize("options", [{}, {"plan": None}])
def test_modules_that_cannot_be_compared_train(accelerator, options):
    def script(device):
        torch.manual_seed(0)
        model = nn.Sequential(OddModule(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.ones(4, 6, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            model.to(device)
        return loss.detach(), [param.detach() for param in model.parameters()]

    accelerator("replicate=2").options = Options(devices=2, **options)
    assert_same(*on_both(script))


class Wrapper(nn.Module):
    """Passes on what is set to the module inside, as Lightning's Fabric does."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.is_made = True

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("is_made") and hasattr(self.inside, name):
            setattr(self.inside, name, value)
        super().__setattr__(name, value)

    def forward(self, x_BF: Tensor, y_B: Tensor) -> tuple[Tensor, Tensor]:
        values_B = self.inside(x_BF).squeeze(-1)
        return F.mse_loss(values_B, y_B), values_B


def test_a_wrapper_that_passes_on_what_is_set_trains(session):
    made = Wrapper(network())
    assert_same(*on_both(lambda device: train(copy.deepcopy(made).to(device), device)))


class Tied(nn.Module):
    """Reads with the embedding of another model, and has a layer of its own."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(6, 1)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.head(self.embedding(ids_BT).mean(1)).square().mean()


def test_models_with_parameters_in_common_train(session):
    def script(device):
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 6)
        first, second = Tied(embedding).to(device), Tied(embedding).to(device)
        parameters = list({id(one): one for model in (first, second) for one in model.parameters()}.values())
        optimizer = torch.optim.SGD(parameters, lr=0.3)
        trace = []
        for step in range(3):
            ids_BT = torch.randint(0, 10, (5, 4), generator=torch.Generator().manual_seed(step)).to(device)
            loss = first(ids_BT) + second(ids_BT + 1 - ids_BT // 9)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trace.append(loss.detach())
        return trace, [param.detach() for param in parameters]

    assert_same(*on_both(script))


class Recurrent(nn.Module):
    def __init__(self, has_buffers: bool) -> None:
        super().__init__()
        self.norm, self.rnn, self.head = nn.LayerNorm(5), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)
        if has_buffers:
            self.norm = nn.BatchNorm1d(6)  # type: ignore[assignment]
            self.norm.weight.requires_grad_(False)

    def forward(self, x_BTF: Tensor) -> Tensor:
        return self.head(self.rnn(self.norm(x_BTF.mT).mT)[1][0][-1])


@pytest.mark.parametrize("has_buffers", [False, True])
def test_a_model_goes_on_after_a_call_with_other_parameters(session, has_buffers):
    """That call takes its buffers and frozen parameters; the list that an LSTM keeps of its weights changes twice."""

    def script(device):
        model, trace = Recurrent(has_buffers).to(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            x_BTF, y_B = torch.randn(8, 5, 6).to(device), torch.randint(3, (8,)).to(device)
            optimizer.zero_grad()
            F.cross_entropy(model(x_BTF), y_B).backward()
            optimizer.step()
            halved = {name: 0.5 * parameter.detach() for name, parameter in model.named_parameters()}
            trace.append(functional_call(model, (halved, dict(model.named_buffers())), (x_BTF,)))
            with torch.no_grad():
                model.norm.weight.mul_(1.1)
        return trace, model.eval()(x_BTF), model.state_dict()

    assert_same(*on_both(script))


class Normalizer(nn.Module):
    """The running mean of what it was shown, as reinforcement learning has it for observations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros(()))

    def show(self, x_BF: Tensor) -> None:
        self.seen.add_(1)
        self.mean.add_((x_BF.mean(0) - self.mean) / self.seen)

    def forward(self, x_BF: Tensor) -> Tensor:
        return x_BF - self.mean


def test_models_with_buffers_in_common_see_what_the_script_writes_there(session):
    def script(device):
        norm, trace = Normalizer(), []
        policy, value = (nn.Sequential(norm, nn.Linear(6, size)).to(device) for size in (3, 1))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (policy, value)]
        for _ in range(3):
            x_BF, y_B = torch.randn(8, 6).to(device) + 1, torch.randint(3, (8,)).to(device)
            norm.show(x_BF)
            losses = F.cross_entropy(policy(x_BF), y_B), F.mse_loss(value(x_BF)[:, 0], y_B.float())
            for optimizer, loss in zip(optimizers, losses):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                trace.append(loss.detach())
        return trace, policy.state_dict(), value.state_dict()

    assert_same(*on_both(script))
