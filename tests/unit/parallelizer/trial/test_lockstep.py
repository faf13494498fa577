"""What is learned of functions in which rows meet, in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from moreh_ap.parallelizer.observation.recorded_calls import NumberRecorder
from moreh_ap.parallelizer.row_dims.row_numbers import RowCount
from moreh_ap.parallelizer.row_dims.row_steps import SHARE, Rows, Step
from moreh_ap.parallelizer.trial.dry_run import Refused
from moreh_ap.parallelizer.trial.lockstep import Lockstep

CPU = torch.device("cpu")
ROWS = 5


def learn(forward: Callable[[Tensor], object], width: int = 4) -> dict[str, Step]:
    """Returns the steps of a forward of (5, width) rows by name; the last of a name counts."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, width)
    calls = []
    for fewer in (x[:3].clone(), x[2:].clone()):
        with NumberRecorder(CPU) as recorder:
            forward(fewer)
        calls.append(recorder.calls)
    lockstep = Lockstep(CPU, rows=(3, 2), dims=[0], fewer=(3, calls[0]), others=calls[1], tolerance=2e-5)
    lockstep.take((x,), {})
    with lockstep:
        forward(x)
    return {step.name: step for step in lockstep.steps}


@pytest.mark.parametrize(
    ("forward", "name", "placement"),
    [
        (lambda x: x.exp(), "exp", Rows(0)),
        (lambda x: x.t(), "t", Rows(1)),
        (lambda x: x.repeat_interleave(2, 0), "repeat_interleave", Rows(0)),
        (lambda x: torch.cat([x, x * 2]), "cat", Rows(0, 2)),
        (lambda x: x.sum(0), "sum", SHARE),
        (lambda x: x.mean(0), "mean", SHARE),
        (lambda x: F.mse_loss(x, x * 2), "mse_loss", SHARE),
        (lambda x: x.t() @ x, "matmul", SHARE),
        (lambda x: x.sum(0) * 2, "mul", SHARE),
        (lambda x: F.batch_norm(x, None, None, training=True), "batch_norm", Rows(0)),
    ],
)
def test_what_workers_have_of_a_result(forward, name, placement):
    step = learn(forward)[name]
    assert (step.results, step.gathers) == ((placement,), False)


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda x: x @ x.t(), "matmul"),
        (lambda x: x.var(0), "var"),
        (lambda x: torch.norm(x, p=2), "norm"),  # PyTorch adds out=None
        (lambda x: x.softmax(0), "softmax"),
        (lambda x: x.sort(dim=0), "sort"),
        (lambda x: x.relu().max(), "max"),
        (lambda x: (x > 0).any(), "any"),
        (lambda x: x.sum().item() and x[0, 0].item(), "__getitem__"),
    ],
)
def test_rows_are_gathered_where_they_meet(forward, name):
    step = learn(forward)[name]
    assert step.gathers
    assert all(placement is None for placement in step.results)


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda x: x[torch.randperm(len(x))], "__getitem__"),
        (lambda x: x[torch.randperm(len(x)), 1:3], "__getitem__"),
        (lambda x: x.index_select(0, torch.randperm(len(x)).argsort()), "index_select"),
        (lambda x: torch.randperm(len(x)).argsort(), "argsort"),
        (lambda x: x.flip(0), "flip"),
        (lambda x: x.roll(1, 0), "roll"),
        (lambda x: x.cumsum(0), "cumsum"),
    ],
)
def test_rows_in_another_order_are_gathered_and_each_worker_goes_on_with_as_many(forward, name):
    step = learn(forward)[name]
    assert (step.gathers, step.cuts, step.results) == (True, True, (Rows(0),))


def test_a_number_that_follows_rows_otherwise_than_as_a_multiple_is_that_of_all_rows():
    """One that comes from values is left alone."""
    step = learn(lambda x: x.clamp(max=int(1.5 * len(x) / 2)))["clamp"]
    assert (step.follows, step.results, step.gathers) == ((RowCount(1, 0, 3),), (Rows(0),), False)
    assert learn(lambda x: x.clamp(max=x.amax().item()))["clamp"].follows == ()


class Counting(nn.Module):
    """Drops rows beyond a place among those of their kind that none of a few rows reaches."""

    def forward(self, x: Tensor) -> Tensor:
        place = (x[:, :2] > 0).cumsum(0)
        return x * (place < 100).any(1, keepdim=True)


def test_a_module_that_counts_rows_up_is_looked_into():
    steps = learn(Counting())
    assert steps["module Counting"].enters and steps["cumsum"].cuts
    assert steps["mul"].results == (Rows(0),) and not steps["mul"].gathers


class Scaled(nn.Linear):
    """A layer whose weight is scaled by a mean of its own, which has no rows (XNOR-Net)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.weight.abs().mean(), self.bias)


def test_a_module_that_takes_a_mean_of_its_weight_is_looked_into():
    steps = learn(Scaled(4, 2))
    assert steps["module Scaled"].enters and steps["mean"].results == ()
    assert steps["linear"].results == (Rows(0),) and not steps["linear"].gathers


class Packed(nn.LSTM):
    """Pads to the longest sequence of the batch, of which a row knows nothing."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x > 0).sum(1).clamp(max=x.shape[1] - 1)
        packed = pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(super().forward(packed)[0], batch_first=True)[0]


def test_a_module_that_pads_to_the_longest_sequence_is_one_step():
    step = learn(Packed(1, 2, batch_first=True))["module Packed"]
    assert (step.enters, step.gathers, step.results) == (False, False, (Rows(0),))


def test_rows_that_are_chosen_are_all_on_every_worker():
    step = learn(lambda x: x[x[:, 0].topk(3)[1]])["__getitem__"]
    assert step.gathers and not step.cuts and step.results == (None,)


def test_summands_are_added_up_before_anything_but_sums():
    steps = learn(lambda x: x - x.mean(0))
    assert steps["sub"].adds_up
    assert steps["sub"].results == (Rows(0),)
    steps = learn(lambda x: x.mean(0).square())
    assert steps["square"].adds_up
    assert steps["square"].results == (None,)


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda x: x.mean(0) + 1e-9, "add"),
        (lambda x: 1e-9 + x.mean(0), "add"),
        (lambda x: x.mean(0) - 1e-9, "sub"),
        (lambda x: x.sum() * (x * 1e-9).sum(), "mul"),
        (lambda x: x.square().sum() / (x * 1e-9).sum(), "div"),
    ],
)
def test_what_each_worker_would_add_is_added_once_however_small_it_is(forward, name):
    steps = learn(forward)
    found = [step for key, step in steps.items() if name in key]
    assert found and all(step.adds_up for step in found[-1:])


@pytest.mark.parametrize("kind", ["made", "given", "weight"])
def test_what_rows_give_is_added_to_zeros_of_the_forward_on_each_worker_and_to_other_zeros_once(kind):
    places, held = torch.tensor([0, 1, 0, 2, 1]), torch.zeros(3, 4)
    held = nn.Parameter(held) if kind == "weight" else held

    def zeros(x):
        return x.new_zeros(3, 1).expand(3, 4).float() if kind == "made" else held

    added = learn(lambda x: zeros(x).index_add(0, places[: len(x)] + (x[:, 0] * 0).long(), x))["index_add"]
    product = learn(lambda x: torch.addmm(zeros(x)[:, :3], x.t()[:3], x[:, :3]))["addmm"]
    layer = learn(lambda x: F.linear(x.t()[:3], x[:, :3].t(), zeros(x)[0, :3]))["linear"]
    assert (added.gathers, product.gathers, layer.gathers) == (kind != "made",) * 3


def test_what_is_written_to_zeros_of_the_forward_makes_them_other_zeros():
    held = torch.zeros(4)
    added = learn(lambda x: torch.addmm(x.new_zeros(4, 4).add_(held), x.t(), x))["addmm"]
    assert added.gathers


def test_a_sum_of_zeros_may_be_anything():
    """The largest entry of zeros looks like a sum; a summand of zero looks like one whatever is added."""
    assert learn(lambda x: (x * 0).amax())["amax"].gathers
    assert learn(lambda x: (x * 0).sum() + 0.0)["add"].adds_up


def test_what_is_made_of_summands_that_were_added_up_is_no_summand_where_it_is_zero():
    """Entropy of a mean of choices, all of which are the same in a trial."""

    def entropy(x: Tensor) -> Tensor:
        shares = F.one_hot((x[:, 0] * 0).long(), 3).float().mean(0)
        return -(shares * shares.log().clamp(min=-9)).sum()

    steps = learn(entropy)
    assert [steps[name].results for name in ("mean", "mul", "sum", "neg")] == [(SHARE,), (None,), (), ()]
    assert learn(lambda x: (x * 0).sum().clone())["clone"].results == (None,)


def test_the_number_of_rows_is_that_of_the_batch_where_it_divides_and_of_the_slice_where_it_shapes():
    steps = learn(lambda x: (x.sum() / x.shape[0], x.view(x.shape[0], 2, 2), torch.eye(len(x)) + x @ x.t()))
    assert (steps["div"].follows, steps["div"].for_all) == ((RowCount(1, 1),), True)
    assert (steps["view"].follows, steps["view"].for_all) == ((RowCount(1, 1),), False)
    assert (steps["eye"].cuts, steps["eye"].results) == (True, (Rows(0),))


def test_a_number_may_be_nearly_a_multiple_of_the_number_of_rows():
    steps = learn(lambda x: x.t() @ x / (2 * len(x) - 1))
    assert (steps["div"].follows, steps["div"].for_all) == ((RowCount(1, 2, -1),), True)
    assert RowCount(1, 2, -1).of(8) == 15
    assert learn(lambda x: x.t() @ x / (len(x) + 2))["div"].follows == (RowCount(1, 0, 7),)


def test_what_is_drawn_for_rows_has_rows():
    steps = learn(lambda x: (torch.randn(len(x), 3), torch.rand_like(x), F.dropout(x)))
    assert [steps[name].results for name in ("randn", "rand_like", "dropout")] == [(Rows(0),)] * 3


def test_writing_to_rows():
    def forward(x: Tensor) -> Tensor:
        result = torch.zeros(len(x), 2)
        result[:, 0] = x[:, 1]
        result.add_(x[:, :2])
        return result

    steps = learn(forward)
    assert not steps["__setitem__"].gathers
    assert steps["add_"].results == (Rows(0),)
    with pytest.raises(Refused, match="writes to rows"):
        learn(lambda x: x.sub_(x.sort(0)[0]))


def test_a_module_that_works_row_by_row_is_one_step():
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = inner(x)
            return y @ y.t()

    model = Model()
    steps = learn(lambda x: model(x))
    assert steps["module Model"].enters
    assert steps["module Sequential"].results == (Rows(0),)
    assert "linear" not in steps


def test_a_forward_that_counts_its_rows_in_python_is_refused():
    with pytest.raises(Refused, match="depends on the number of rows"):
        learn(lambda x: torch.stack([x[row] for row in range(len(x))]))


class Filling(nn.Module):
    """Adds what it computes to the dict that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        features["embedding"] = self.layer(features["x"])
        return features


def test_a_module_that_adds_to_the_dict_it_is_given_is_one_step() -> None:
    model = Filling()
    steps = learn(lambda x: (embedding := model({"x": x})["embedding"]) @ embedding.t())
    assert steps["module Filling"].results == (Rows(0), Rows(0))
    assert steps["matmul"].gathers


class RoundsByRows(nn.Module):
    """Gives other last digits for another number of rows, as a matrix product may."""

    def forward(self, x: Tensor) -> Tensor:
        return x + len(x) * 1e-6


def test_a_difference_that_is_rounding_alone_has_the_rows_of_its_arguments():
    layer = RoundsByRows()
    step = learn(lambda x: layer(x) - x)["sub"]
    assert (step.results, step.gathers) == ((Rows(0),), False)


def test_a_module_that_gets_summands_computes_a_part_of_their_sum_on_each_worker():
    expert = nn.Linear(4, 3)
    step = learn(lambda x: x @ expert(x.t() @ x))["module Linear"]
    assert (step.adds_up, step.deals, step.results) == (True, Rows(0), (None,))


def test_a_module_that_draws_is_not_dealt_out():
    experts = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    steps = learn(lambda x: x @ experts(x.t() @ x))
    assert steps["module Sequential"].enters and steps["module Linear"].deals == Rows(0)
