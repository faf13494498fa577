"""Mixtures of experts with dropout: workers draw for the rows that all of them route to an expert."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both, train_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.rotating  # one more model or plan each


@pytest.fixture(params=["replicate=2", "shard=2", "replicate=3"], autouse=True)
def session(request, accelerator):
    return accelerator(request.param, strict=True)  # a call that every device computes whole is an error


class Expert(nn.Module):
    """Two linear layers, with dropout behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 16), nn.Dropout(0.3))

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.layers(x_ND)


class Layer(nn.Module):
    """Three experts that each compute some of the rows; which ones is for the subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(16), nn.Linear(16, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def mixed(self, x_BTD: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.mixed(self.norm(x_BTD))


class Masked(Layer):
    """The rows of an expert are those of a mask, in the order of the batch."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        scores_BTE = self.router(x_BTD)
        best_BTK, chosen_BTK = scores_BTE.topk(2, dim=-1)
        gates_BTE = torch.full_like(scores_BTE, -torch.inf).scatter(-1, chosen_BTK, best_BTK).softmax(-1)
        flat_ND, gates_NE, result_ND = x_BTD.flatten(0, 1), gates_BTE.flatten(0, 1), torch.zeros_like(x_BTD)
        for number, expert in enumerate(self.experts):
            mask_BT = (chosen_BTK == number).any(-1)
            if mask_BT.any():
                given_MD = expert(flat_ND[mask_BT.flatten()])
                result_ND[mask_BT] += given_MD * gates_NE[mask_BT.flatten(), number].unsqueeze(1)
        return result_ND


class ByChoice(Layer):
    """The rows of an expert are those that chose it first, and then those that chose it second, as in Mixtral."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        flat_ND = x_BTD.flatten(0, 1)
        weights_NK, chosen_NK = self.router(flat_ND).softmax(-1).topk(2, dim=-1)
        mask_EKN, result_ND = F.one_hot(chosen_NK, 3).permute(2, 1, 0), torch.zeros_like(flat_ND)
        for number, expert in enumerate(self.experts):
            choice_M, row_M = torch.where(mask_EKN[number])
            result_ND.index_add_(0, row_M, expert(flat_ND[row_M]) * weights_NK[row_M, choice_M, None])
        return result_ND.view_as(x_BTD)


class Recomputed(ByChoice):
    """The experts compute again in the backward, and draw what they drew."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        return checkpoint(super().mixed, x_BTD, use_reentrant=False)


class Repeated(Layer):
    """Each row is repeated for each of its choices, as in DeepSeek."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        flat_ND = x_BTD.flatten(0, 1)
        weights_NK, chosen_NK = self.router(flat_ND).softmax(-1).topk(2, dim=-1)
        copies_MD, chosen_M = flat_ND.repeat_interleave(2, dim=0), chosen_NK.flatten()
        result_MD = torch.empty_like(copies_MD)
        for number, expert in enumerate(self.experts):
            result_MD[chosen_M == number] = expert(copies_MD[chosen_M == number])
        return (result_MD.view(-1, 2, 16) * weights_NK.unsqueeze(-1)).sum(1).view_as(x_BTD)


class Switch(Layer):
    """Each row goes to one expert; an expert is called without rows too, which some workers have none for."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        flat_ND = x_BTD.flatten(0, 1)
        best_N, chosen_N = self.router(flat_ND * 3).softmax(-1).max(-1)
        rows = [torch.eq(chosen_N, number).nonzero(as_tuple=True)[0] for number in range(3)]
        result_ND = flat_ND.new_zeros(flat_ND.shape)
        for row_M, given_MD in zip(rows, [expert(flat_ND[row_M]) for expert, row_M in zip(self.experts, rows)]):
            result_ND[row_M, :] = given_MD
        return (result_ND * best_N.view(-1, 1)).view_as(x_BTD)


class Sorted(Layer):
    """Copies of rows are sorted by expert, and added up by index."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        flat_ND = x_BTD.flatten(0, 1)
        weights_NK, chosen_NK = self.router(flat_ND).softmax(-1).topk(2, dim=-1)
        order_M = chosen_NK.flatten().argsort(stable=True)
        row_M = torch.arange(len(flat_ND), device=x_BTD.device).repeat_interleave(2)[order_M]
        counts = chosen_NK.flatten().bincount(minlength=3).tolist()
        given = [expert(part) for expert, part in zip(self.experts, flat_ND[row_M].split(counts))]
        given_MD = torch.cat(given) * weights_NK.flatten()[order_M].unsqueeze(-1)
        index_MD = row_M.unsqueeze(-1).expand(-1, 16)
        return torch.zeros_like(flat_ND).scatter_reduce(0, index_MD, given_MD, reduce="sum").view_as(x_BTD)


class RecomputedSwitch(Switch):
    """What is drawn for the rows of others is drawn again where experts compute again."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        return checkpoint(super().mixed, x_BTD, use_reentrant=False)


class LanguageModel(nn.Module):
    """Two layers of experts, and dropout in front of them."""

    def __init__(self, layer_class: type[Layer]) -> None:
        super().__init__()
        self.embed, self.dropout, self.head = nn.Embedding(40, 16), nn.Dropout(0.1), nn.Linear(16, 40)
        self.layers = nn.ModuleList(layer_class() for _ in range(2))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.dropout(self.embed(tokens_BT))
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return F.cross_entropy(self.head(x_BTD).flatten(0, 1), targets_BT.flatten())


@pytest.mark.parametrize("layer_class", [Masked, ByChoice, Recomputed, Repeated, Switch, Sorted, RecomputedSwitch])
def test_experts_drop_what_they_drop_on_one_device(layer_class):
    def script(device):
        torch.manual_seed(0)
        model = LanguageModel(layer_class).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for rows in (6, 6, 7, 9):
            tokens = torch.randint(0, 40, (rows, 12)).to(device)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            train_step(trace, model, optimizer, loss)
        return [*trace, *model.state_dict().values(), torch.rand(2)]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)


class BalancedByChoice(ByChoice):
    """Has a loss that balances experts: the part of the rows that prefer one, times its mean probability."""

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        scores_NE = self.router(self.norm(x_BTD).flatten(0, 1))
        preferred_E = F.one_hot(scores_NE.argmax(-1), 3).float().mean(0)
        return super().forward(x_BTD), 3 * (preferred_E * scores_NE.softmax(-1).mean(0)).sum()


class BalancedExperts(LanguageModel):
    """Adds up the losses of its layers, or returns their sum."""

    def __init__(self, returns_balance: bool) -> None:
        super().__init__(BalancedByChoice)
        self.returns_balance = returns_balance

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x_BTD, balance = self.dropout(self.embed(tokens_BT)), 0.0
        for layer in self.layers:
            x_BTD, of_layer = layer(x_BTD)
            balance = balance + of_layer
        logits_BTV = self.head(x_BTD)
        if self.returns_balance:
            return logits_BTV, balance
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten()) + balance


@pytest.mark.parametrize("returns_balance", [False, True])
def test_experts_are_balanced_over_the_batch(returns_balance):
    def script(device):
        torch.manual_seed(0)
        model = BalancedExperts(returns_balance).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for rows in (6, 7):
            tokens = torch.randint(0, 40, (rows, 12)).to(device)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            if returns_balance:
                loss = F.cross_entropy(loss[0].flatten(0, 1), tokens[:, 1:].flatten()) + loss[1]
            train_step(trace, model, optimizer, loss)
        with torch.no_grad():
            trace.append(model.eval()(tokens[:, :-1], tokens[:, 1:]))
        return [*trace, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)


class Skipping(Layer):
    """Asks how many of a worker's rows go to an expert: none is none of any worker, for all it knows."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        flat_ND = x_BTD.flatten(0, 1)
        best_N, chosen_N = self.router(flat_ND).softmax(-1).max(-1)
        result_ND = torch.zeros_like(flat_ND)
        for number, expert in enumerate(self.experts):
            row_M = torch.eq(chosen_N, number).nonzero()[:, 0]
            if row_M.shape[0]:
                result_ND[row_M] = expert(flat_ND[row_M]) * best_N[row_M, None]
        return result_ND.view_as(x_BTD)


class Hit(ByChoice):
    """Goes through the experts that any row goes to, as transformers does."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        flat_ND = x_BTD.flatten(0, 1)
        weights_NK, chosen_NK = self.router(flat_ND).softmax(-1).topk(1, dim=-1)
        mask_EKN, result_ND = F.one_hot(chosen_NK, 3).permute(2, 1, 0), torch.zeros_like(flat_ND)
        for number in torch.greater(mask_EKN.sum(dim=(-1, -2)), 0).nonzero():
            choice_M, row_M = torch.where(mask_EKN[number].squeeze(0))
            result_ND.index_add_(0, row_M, self.experts[number](flat_ND[row_M]) * weights_NK[row_M, choice_M, None])
        return result_ND.view_as(x_BTD)


@pytest.mark.parametrize(("layer_class", "is_whole"), [(Masked, False), (Hit, False), (Skipping, True)])
def test_an_expert_that_only_some_workers_have_rows_for(request, accelerator, capsys, layer_class, is_whole):
    """Workers come to it together where the forward asks whether any row goes to it; else the call runs whole."""
    accelerator(request.node.callspec.params["session"], strict=not is_whole)

    def script(device):
        torch.manual_seed(0)
        model = LanguageModel(layer_class).to(device)
        tokens = torch.randint(0, 20, (6, 12))
        losses = []
        for alike in (False, True, False):
            batch = tokens.clone()
            if alike:  # the first rows choose two experts, and others choose others
                batch[:3] = 7
            loss = model(batch[:, :-1].to(device), batch[:, 1:].to(device))
            loss.backward()
            losses.append(loss.detach())
        return losses, [parameter.grad for parameter in model.parameters()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)
    assert ("Every device computes the whole batch" in capsys.readouterr().out) is is_whole


class Telling(Switch):
    """Also returns how it routes each word."""

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x_BTD), self.router(x_BTD.flatten(0, 1)).softmax(-1)


class Balanced(nn.Module):
    """Returns how its layers route all words: two layers by words of all rows, so that rows lie along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.layers = nn.ModuleList(Telling() for _ in range(2))

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD, gates = self.embed(tokens_BT), []
        for layer in self.layers:
            x_BTD, gates_NE = layer(x_BTD)
            gates.append(gates_NE)
        return self.head(x_BTD), torch.stack(gates)


def test_results_whose_rows_lie_along_another_dim_are_gathered():
    def script(device):
        torch.manual_seed(0)
        model = Balanced().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for rows in (6, 7, 9):
            tokens = torch.randint(0, 40, (rows, 12)).to(device)
            scores_BTN, gates_LNE = model(tokens[:, :-1])
            chosen_LNE = F.one_hot(gates_LNE.argmax(-1), 3).float()
            loss = F.cross_entropy(scores_BTN.flatten(0, 1), tokens[:, 1:].flatten())
            loss = loss + 0.1 * 3 * (chosen_LNE.mean(1) * gates_LNE.mean(1)).sum()
            train_step(trace, model, optimizer, loss)
            trace.append(gates_LNE.detach())
        return [*trace, *model.state_dict().values(), torch.rand(2)]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)
