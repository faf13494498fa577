"""Trials of a few rows that raise an error: by the script's forward, which is tried on more rows, or by our fault."""

from __future__ import annotations

import pytest
import torch
from rotating import rotating_from
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from moreh_ap.errors import TrialError, TrialWarning, UnsplitError

WHOLE = "Every device computes the whole batch"


class GroupsOfFour(nn.Module):
    """Compares rows in groups of four, as losses of several pictures of one person do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(6, 8), nn.Dropout(0.3)

    def forward(self, x_BF: Tensor) -> Tensor:
        groups_G4H = self.dropout(self.first(x_BF)).view(-1, 4, 8)
        return (groups_G4H - groups_G4H.mean(1, keepdim=True)).square().mean((1, 2)).mean()


class KeepsItsState(nn.Module):
    """The hidden state of one call, whose rows are second, is where the next call begins."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 2)
        self.hidden = None

    def forward(self, x_BTF: Tensor) -> Tensor:
        output_BTH, hidden_LBH = self.recurrent(x_BTF, self.hidden)
        self.hidden = hidden_LBH.detach()
        return self.last(output_BTH[:, -1])


class RaisesUnderOurModes(nn.Module):
    """Stands for a fault of ours: on one device it runs with any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 2)

    def forward(self, x_BF: Tensor) -> Tensor:
        if any(type(mode).__name__ == "GlobalReduction" for mode in _get_current_function_mode_stack()):
            raise KeyError("a fault of ours")
        return self.last(x_BF)


def train(model_class: type[nn.Module], batches: list[tuple[int, ...]]):
    def script(device):
        model = model_class().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trace = []
        for shape in batches:
            loss = model(torch.randn(shape).to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(torch.tensor(loss.item()))
        return [*trace, *model.parameters()]

    return script


@pytest.mark.parametrize("plan", rotating_from(1, ["replicate=2", "shard=2", "replicate=2,micro_batches=2"]))
def test_a_forward_that_needs_four_rows_is_tried_on_four(accelerator, capsys, plan):
    accelerator(plan, strict=True)
    assert_same(*on_both(train(GroupsOfFour, [(16, 6), (16, 6), (32, 6)])))
    assert WHOLE not in capsys.readouterr().out


def test_a_batch_that_cannot_be_dealt_out_in_groups_is_computed_whole(accelerator, capsys):
    accelerator("replicate=2")
    assert_same(*on_both(train(GroupsOfFour, [(16, 6), (12, 6), (16, 6)])))
    assert f"{WHOLE}: its 12 rows cannot be dealt out in groups of 4" in capsys.readouterr().out


def test_a_state_whose_rows_are_second_is_cut_with_the_input(accelerator, capsys):
    accelerator("replicate=2", strict=True)
    assert_same(*on_both(train(KeepsItsState, [(8, 3, 6)] * 3)))
    assert WHOLE not in capsys.readouterr().out


def test_a_single_row_without_a_dim_of_rows_is_no_batch(accelerator, capsys):
    accelerator("replicate=2", strict=True)
    assert_same(*on_both(train(lambda: nn.Linear(6, 2), [(6,)] * 2)))
    assert "the input is a single row, without a dim of rows" in capsys.readouterr().out


def test_a_forward_that_runs_on_the_whole_batch_alone_is_computed_whole(accelerator):
    class EightRows(nn.Linear):
        def forward(self, x_BF: Tensor) -> Tensor:
            return super().forward(x_BF + x_BF[7])

    accelerator("replicate=2", strict=True)
    model = EightRows(6, 2).cuda()
    with pytest.raises(UnsplitError, match="of a few rows raised IndexError: index 7 is out of bounds"):
        model(torch.randn(8, 6).cuda())


class LongestFirst(nn.Linear):
    """Is given a pair, which is no list of two items."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x_BF, lengths_B = pair
        if lengths_B[0] != 8:
            raise ValueError("the longest is not the first")
        return super().forward(x_BF)


def test_what_is_said_of_a_pair_of_tensors_is_what_stopped_its_rows(accelerator):
    accelerator("replicate=2", strict=True)
    model = LongestFirst(6, 2).cuda()
    lengths = torch.tensor([8, 3, 7, 2, 6, 1, 5, 4]).cuda()
    with pytest.raises(UnsplitError, match=r"the longest is not the first\. As 2 items: .*: not enough"):
        model((torch.randn(8, 6).cuda(), lengths))


class WithTheFirst(nn.Linear):
    """Compares what a list has with its first entry, the way in which no two devices can share it."""

    def forward(self, pictures: list[Tensor]) -> Tensor:
        first = super().forward(pictures[0]).detach().sum().item()
        return sum(super(WithTheFirst, self).forward(one).mean() * (1 + first) for one in pictures)


def test_a_list_of_pictures_with_one_row_each_has_not_too_few_rows(accelerator):
    accelerator("replicate=2", strict=True)
    model = WithTheFirst(6, 2).cuda()
    with pytest.raises(UnsplitError, match=f"^{WHOLE}: (?!the batch has fewer rows)"):
        model([torch.randn(1, 6).cuda() for _ in range(4)])


def test_a_call_without_tensors_has_no_rows_rather_than_too_few(accelerator, capsys):
    class OfNumbers(nn.Linear):
        def forward(self, numbers: list[float]) -> Tensor:
            return super().forward(torch.tensor(numbers, device=self.weight.device)).sum()

    accelerator("replicate=2", strict=True)
    OfNumbers(6, 2).cuda()([0.5] * 6).backward()
    assert f"{WHOLE}: no input is a tensor with rows" in capsys.readouterr().out


def test_a_fault_of_ours_is_a_warning_with_its_traceback(accelerator):
    accelerator("replicate=2")
    with pytest.warns(TrialWarning, match="RaisesUnderOurModes on a few rows failed by a fault of moreh_ap") as warned:
        assert_same(*on_both(train(RaisesUnderOurModes, [(8, 6)] * 3)))
    (text,) = {str(one.message) for one in warned if one.category is TrialWarning}
    assert "Traceback (most recent call last)" in text and "KeyError: 'a fault of ours'" in text
    assert text.endswith("docs/errors.md#trialwarning")


def test_a_fault_of_ours_is_an_error_if_asked_for(accelerator):
    accelerator("replicate=2", strict=True)
    model = RaisesUnderOurModes().cuda()
    with pytest.raises(TrialError, match="KeyError: 'a fault of ours'"):
        model(torch.randn(8, 6).cuda())


class Forces(nn.Module):
    """The energy of atoms and what pulls at each: the forward differentiates, and needs gradients to run at all."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.last = nn.Embedding(4, 6), nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, kinds_BA: Tensor, places_BAX: Tensor) -> tuple[Tensor, Tensor]:
        places_BAX = places_BAX.requires_grad_()
        energy_B = self.last(torch.cat([self.kinds(kinds_BA), places_BAX], dim=-1)).sum((1, 2))
        ones = torch.ones_like(energy_B)
        (gradient_BAX,) = torch.autograd.grad(energy_B, places_BAX, grad_outputs=ones, create_graph=True)
        return energy_B, -gradient_BAX


def test_a_forward_that_differentiates_is_tried_with_gradients(accelerator, capsys):
    def script(device):
        torch.manual_seed(0)
        model = Forces().to(device)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            energy, forces = model(torch.randint(4, (6, 5)).to(device), torch.randn(6, 5, 3).to(device))
            loss = energy.square().mean() + (forces - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, [parameter.grad for parameter in model.parameters()]

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert "computes the whole batch" not in capsys.readouterr().out
