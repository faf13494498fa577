"""Batches with fewer rows than there are workers: some compute one row each, which others compute too, for nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from one_line_models import VOCABULARY, OwnTransformer, ragged_batches, tiny_llama
from test_one_line_training import assert_same, on_both
from torch import nn

from moreh_ap.session.calls import answer_check

pytestmark = pytest.mark.rotating  # one more plan or model each

PLANS = ["replicate=3", "shard=3"]


class Layers(nn.Module):
    """Convolutions, a view that needs a row, optionally normalisation or dropout."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Conv2d(1, 4, 3), between or nn.Identity(), nn.Linear(64, 3)

    def forward(self, x):
        features = self.between(F.gelu(self.first(x)))
        return self.last(features.view(len(x), -1))


@pytest.fixture
def modes(monkeypatch):
    """How calls were shared, by whether they had gradients."""
    found, original = [], answer_check.learn_structure

    def learn(model, key, replies, *, grad):
        structure = original(model, key, replies, grad=grad)
        found.append((grad, structure.mode, None if structure.batch is None else structure.batch.rows))
        return structure

    monkeypatch.setattr("moreh_ap.session.calls.remote_call.learn_structure", learn)
    return found


def train(model: nn.Module, batches, loss_of) -> list[torch.Tensor]:
    """Returns losses, and the gradients of the last step, of steps with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        trace.append(loss.detach())
    return trace + [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("plan", PLANS)
def test_losses_inside_and_outside_of_the_model_are_those_of_one_device(accelerator, plan, modes):
    accelerator(plan)

    def script(device):
        torch.manual_seed(0)
        model = OwnTransformer().to(device)
        ids = [torch.randint(VOCABULARY, (rows, 7)) for rows in (2, 2, 5, 2)]
        trace = train(model, [one.to(device) for one in ids], lambda model, x: model(x, x)[1])
        trace += train(model, [ids[0].to(device)] * 2, lambda model, x: F.cross_entropy(model(x)[0].mT, x))
        model.eval()
        with torch.no_grad():
            return [*trace, *model(ids[1].to(device), ids[0].to(device))]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert {mode for _, mode, _ in modes} == {"split"}
    assert (True, "split", (1, 1, 0)) in modes and (False, "split", (1, 1, 0)) in modes


@pytest.mark.parametrize("plan", PLANS)
def test_large_outputs_stay_on_the_workers(accelerator, plan, modes):
    accelerator(plan)

    def script(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 60_000)).to(device)
        x, y = torch.randn(2, 8).to(device), torch.tensor([3, 59_999]).to(device)
        return train(model, [x, x], lambda model, x: F.cross_entropy(model(x), y))

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)
    assert modes == [(True, "split", (1, 1, 0))]


@pytest.mark.parametrize("plan", PLANS)
def test_dropout_drops_what_one_device_drops(accelerator, plan, modes):
    accelerator(plan)

    def script(device):
        torch.manual_seed(0)
        model, x = Layers(nn.Dropout(0.5)).to(device), torch.randn(2, 1, 6, 6).to(device)
        return [*train(model, [x] * 3, lambda model, x: model(x).square().sum()), torch.rand(3)]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)
    assert {mode for _, mode, _ in modes} == {"split"}


@pytest.mark.parametrize("plan", [*PLANS, "replicate=3,recompute=full"])
def test_a_model_of_transformers_trains_and_generates(accelerator, plan, modes):
    accelerator(plan)

    def script(device):
        torch.manual_seed(0)
        model = tiny_llama().to(device)
        batches = [{name: one.to(device) for name, one in batch.items()} for batch in ragged_batches(3, 2)]
        trace = train(model, batches, lambda model, batch: model(**batch).loss)
        model.eval()
        prompt = torch.randint(3, 60, (2, 5)).to(device)
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
        return [*trace, made]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert (True, "split", (1, 1, 0)) in modes and (False, "split", (1, 1, 0)) in modes


def test_what_one_model_leaves_on_the_workers_is_given_to_another(accelerator, modes):
    accelerator("replicate=3")

    def script(device):
        torch.manual_seed(0)
        teacher, student = Layers().to(device), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)

        def loss_of(student, x):
            return F.mse_loss(student(teacher(x).detach()), torch.ones(len(x), 3, device=device))

        return train(student, [torch.randn(rows, 1, 6, 6).to(device) for rows in (2, 2, 4, 2)], loss_of)

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)
    assert {mode for _, mode, _ in modes} == {"split"}


def needs_statistics(device):
    """Normalisation by the statistics of the batch."""
    model, x = Layers(nn.BatchNorm2d(4)).to(device), torch.randn(2, 1, 6, 6).to(device)
    return train(model, [x, x], lambda model, x: model(x).square().sum())


def wants_input_gradients(device):
    """A gradient for each row of the input."""
    model, x = Layers().to(device), torch.randn(2, 1, 6, 6).to(device).requires_grad_()
    return [*train(model, [x, x], lambda model, x: model(x).square().sum()), x.grad]


def has_hooks(device):
    """A hook of the script, which sees the rows of all workers."""
    model, x, seen = Layers().to(device), torch.randn(2, 1, 6, 6).to(device), []
    model.first.register_forward_hook(lambda module, given, result: seen.append(result.detach().clone()))
    return [*train(model, [x, x], lambda model, x: model(x).square().sum()), *seen]


@pytest.mark.parametrize("needs", [needs_statistics, wants_input_gradients, has_hooks])
def test_what_cannot_be_lent_is_computed_whole(accelerator, needs, modes, capsys):
    accelerator("replicate=3")

    def script(device):
        torch.manual_seed(0)
        return needs(device)

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert {mode for _, mode, _ in modes} == {"unsplit"}
    assert "whole batch: the batch has fewer rows than there are devices" in capsys.readouterr().out


def test_the_verdict_on_few_rows_is_not_that_on_more(accelerator, modes):
    accelerator("replicate=3")

    def script(device):
        torch.manual_seed(0)
        model = Layers(nn.BatchNorm2d(4)).to(device)
        batches = [torch.randn(rows, 1, 6, 6).to(device) for rows in (2, 6, 2, 6)]
        return train(model, batches, lambda model, x: model(x).square().mean())

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert [mode for _, mode, _ in modes] == ["unsplit", "split"]


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_a_layer_that_merges_four_rows_into_one_is_split_between_groups_of_four(accelerator, plan):
    accelerator(plan, strict=True)

    class Compression(nn.Module):
        """As compressive transformers have it: `mem_TBD` has its steps first."""

        def __init__(self) -> None:
            super().__init__()
            self.merged = nn.Conv1d(6, 6, kernel_size=4, stride=4)

        def forward(self, mem_TBD):
            return self.merged(mem_TBD.permute(1, 2, 0)).permute(2, 0, 1)

    def script(device):
        torch.manual_seed(0)
        model = Compression().to(device)
        sizes = [(8, 3), (16, 3), (16, 800)]  # the last stays on the workers
        batches = [torch.randn(*size, 6).to(device) for size in sizes]
        return train(model, batches, lambda model, mem: (model(mem) * 2).pow(2).mean())

    assert_same(*on_both(script))
