"""Recomputation in the backward changes memory and nothing else."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import recompute_jobs as jobs
import torch
from parallelizer_models import make_batch
from parallelizer_team import Team
from torch import nn

from moreh_ap.parallelizer.data import selective_recompute
from moreh_ap.parallelizer.data.recompute import apply_recompute
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.surroundings.placement import OwnDevice
from moreh_ap.plan import Plan

pytestmark = pytest.mark.rotating  # one more model or plan each

KINDS = ["selective", "full", "2"]
MODELS = ["llama", "gpt2 with dropout", "own", "own with dropout"]


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: param.grad.clone() for key, param in model.named_parameters() if param.grad is not None}


@pytest.fixture(scope="module")
def plain(team: Team) -> Any:
    """What workers compute under a plan without recomputation, each plan once."""

    @cache
    def run(name: str, plan: str) -> Any:
        return team.run(Plan.parse(plan).num_devices, jobs.gradients, name=name, plan=plan)

    return run


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "replicate=1,micro_batches=2", "shard=2,micro_batches=2"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_without(team: Team, plain: Any, name: str, plan: str) -> None:
    wanted = plain(name, plan)[0]
    assert wanted[0] == "split"
    for kind in KINDS:
        results = team.run(Plan.parse(plan).num_devices, jobs.gradients, name=name, plan=f"{plan},recompute={kind}")
        for mode, losses, grads, talks in results:
            assert (mode, losses, talks) == (wanted[0], wanted[1], wanted[3]), kind
            assert grads.keys() == wanted[2].keys()
            for key, grad in grads.items():
                torch.testing.assert_close(grad, wanted[2][key], rtol=1e-6, atol=1e-9, msg=f"{kind}: {key}")


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_bfloat16_under_fsdp(team: Team, plain: Any, recompute: str) -> None:
    plan = "shard=2,precision=bf16"
    wanted = plain("llama", plan)[0]
    got = team.run(2, jobs.gradients, name="llama", plan=f"{plan},recompute={recompute}")[0]
    assert got[1] == wanted[1]
    for key, grad in got[2].items():
        torch.testing.assert_close(grad, wanted[2][key], rtol=1e-6, atol=1e-9, msg=key)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_dropout_that_is_off_in_the_forward_is_off_again(recompute: str) -> None:
    off = jobs.make_model("own").train()
    with OwnDevice(jobs.CPU):
        off(**make_batch("llama", 0))[0].backward()
    for key, grad in jobs.without_dropout(0, 1, recompute).items():
        assert torch.equal(grad, grads_of(off)[key]), key


@pytest.mark.parametrize("name", ["llama", "gpt2 with dropout", "own"])
def test_less_is_kept(name: str) -> None:
    none, selective, first, full = (jobs.live_bytes(name, kind) for kind in ("none", "selective", 1, "full"))
    assert full < selective < none
    assert full < first < none
    assert full < 0.6 * none


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("stop_early", [False, True])
def test_several_backwards_through_one_graph(recompute: str, stop_early: bool) -> None:
    model = jobs.make_model("own with dropout").train()
    apply_recompute(jobs.blocks_of(model), recompute, stop_early=stop_early)
    with OwnDevice(jobs.CPU):
        loss, _ = model(**make_batch("llama", 0))
    loss.backward(retain_graph=True)
    once = grads_of(model)
    loss.backward()
    for key, grad in grads_of(model).items():
        torch.testing.assert_close(grad, 2 * once[key], msg=key)


def test_nothing_is_recomputed_without_gradients() -> None:
    model = jobs.make_model("llama").eval()
    calls: list[int] = []
    for block in jobs.blocks_of(model):
        block.input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    apply_recompute(jobs.blocks_of(model), "full")
    with torch.no_grad():
        model(**make_batch("llama", 0))
    assert len(calls) == 3
    model(**make_batch("llama", 0)).loss.backward()
    assert len(calls) == 3 + 2 * 3


def test_a_number_means_the_first_blocks() -> None:
    model = jobs.make_model("llama")
    apply_recompute(jobs.blocks_of(model), 2)
    assert ["forward" in vars(block) for block in jobs.blocks_of(model)] == [True, True, False]
    other = jobs.make_model("llama")
    apply_recompute(jobs.blocks_of(other), 9)
    assert all("forward" in vars(block) for block in jobs.blocks_of(other))
    apply_recompute(jobs.blocks_of(jobs.make_model("llama")), "none")


def test_names_and_signature_stay() -> None:
    model, plain_model = jobs.make_model("llama"), jobs.make_model("llama")
    apply_recompute(jobs.blocks_of(model), "full")
    assert list(model.state_dict()) == list(plain_model.state_dict())
    block, plain_block = jobs.blocks_of(model)[0], jobs.blocks_of(plain_model)[0]
    assert inspect.signature(block.forward) == inspect.signature(plain_block.forward)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_running_statistics_count_once(recompute: str) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    apply_recompute([block], recompute)
    values = torch.randn(6, 4)
    block(values).sum().backward()
    normal = block[1]
    torch.testing.assert_close(normal.running_mean, 0.1 * nn.functional.linear(values, *block[0].parameters()).mean(0))
    assert normal.num_batches_tracked == 1


class CachingBlock(nn.Module):
    """A block that writes to one of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, hidden: torch.Tensor, memory: list[torch.Tensor]) -> torch.Tensor:
        """[rows, 3] -> [rows, 3], and the memory is longer by one"""
        memory.append(self.linear(hidden).tanh())
        return torch.stack(memory).sum(0)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_an_argument_that_is_written_to(recompute: str) -> None:
    grads = []
    for kind in ("none", recompute):
        torch.manual_seed(0)
        blocks = [CachingBlock(), CachingBlock()]
        apply_recompute(blocks, kind)
        memory: list[torch.Tensor] = []
        hidden = torch.ones(2, 3)
        for block in blocks:
            hidden = block(hidden, memory=memory)
        assert len(memory) == 2
        hidden.square().sum().backward()
        assert len(memory) == 2
        grads.append([param.grad for block in blocks for param in block.parameters()])
    assert all(torch.equal(got, wanted) for got, wanted in zip(*grads, strict=True))


def test_modes_are_as_before_after_a_recomputation_that_raises() -> None:
    class Fails(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 1:
                raise ValueError("the second time")
            return self.linear(values).exp()

    block = Fails()
    apply_recompute([block], "selective")
    before = torch.overrides._get_current_function_mode_stack()
    with GlobalReduction(jobs.CPU, record=True):
        result = block(torch.ones(2, 2))
    with OwnDevice(jobs.CPU) as outside:
        with pytest.raises(ValueError, match="the second time"):
            result.sum().backward()
        assert torch.overrides._get_current_function_mode_stack() == [*before, outside]
    assert torch.overrides._get_current_function_mode_stack() == before


@pytest.mark.parametrize("operation", sorted(selective_recompute._ATTENTION, key=str), ids=str)
def test_attention_that_drops_is_not_kept(operation: Any) -> None:
    """Whoever draws random numbers in the first run has to draw them again, or all later draws differ."""
    names = [argument.name for argument in operation._schema.arguments]
    values = [0.0 if name == "dropout_p" else None for name in names]
    assert selective_recompute._is_kept(operation, values[: names.index("dropout_p")], {})
    assert selective_recompute._is_kept(operation, values, {})
    values[names.index("dropout_p")] = 0.1
    assert not selective_recompute._is_kept(operation, values, {})
    assert not selective_recompute._is_kept(operation, values[:3], {"dropout_p": 0.1})


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_block_that_changes_its_input_is_refused(recompute: str) -> None:
    class Changes(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input.add_(1.0)).exp()

    block = Changes(2, 2)
    apply_recompute([block], recompute)
    result = block(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
