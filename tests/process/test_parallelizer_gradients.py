"""Gradients, outputs and weights outside the plain training loop are those of one process."""

from __future__ import annotations

from typing import Any

import parallelizer_jobs as jobs
import pytest
import torch
from parallelizer_models import ROWS, loss_of, make_batch, make_model
from parallelizer_team import Team
from torch import nn

pytestmark = pytest.mark.rotating  # the same under one more plan or order each

PLANS = ["replicate=2", "shard=2", "replicate=3", "shard=3", "replicate=2,shard=2"]


def run(team: Team, plan: str, job: Any, **arguments: Any) -> list[Any]:
    return team.run(jobs.Plan.parse(plan).num_devices, job, plan=plan, **arguments)


def assert_same_gradients(got: dict[str, Any], model: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert (got[name] is None) == (param.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(got[name], param.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("order", ["one by one", "forwards first", "backwards in another order"])
@pytest.mark.parametrize("plan", [*PLANS, "replicate=2,micro_batches=2", "shard=2,micro_batches=2"])
def test_gradients_accumulate(team: Team, plan: str, order: str) -> None:
    model = make_model("gpt2")
    for step in range(3):
        (loss_of(model(**make_batch("gpt2", step))) * (step + 1) / 4).backward()
    for gradients in run(team, plan, jobs.accumulate, order=order):
        assert_same_gradients(gradients, model)


@pytest.mark.parametrize("name", ["classifier", "skipping", "routed"])
@pytest.mark.parametrize("plan", ["shard=2,micro_batches=2", "replicate=2,shard=2,micro_batches=2"])
def test_micro_batches_leave_no_whole_gradients(team: Team, plan: str, name: str) -> None:
    model = make_model(name)
    for _ in range(2):
        loss_of(model(**jobs.skipping_batch(4 * jobs.Plan.parse(plan).num_devices))).backward()
    outside = 4 * sum(p.numel() for key, p in model.named_parameters() if not key.startswith("blocks."))
    for most, whole, block, gradients in run(team, plan, jobs.whole_gradients, name=name):
        assert 0 < most <= block + outside < whole
        assert_same_gradients(gradients, model)


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_freeze_and_thaw(team: Team, plan: str) -> None:
    model = make_model("llama")
    model.model.layers[0].requires_grad_(False)
    wanted = []
    for names, flag in (
        ((), False),
        (("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"), False),
        (("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"), True),
    ):
        for name in names:
            model.get_parameter(name).requires_grad_(flag)
        model.zero_grad()
        loss_of(model(**make_batch("llama", 0))).backward()
        wanted.append({name: param.grad for name, param in model.named_parameters()})
    for stages in run(team, plan, jobs.freeze):
        for got, want in zip(stages, wanted, strict=True):
            assert [n for n in want if want[n] is None] == [n for n in got if got[n] is None]
            for name in want:
                if want[name] is not None:
                    torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("plan", [*PLANS, "replicate=2,micro_batches=2"])
def test_a_loss_made_from_logits(team: Team, plan: str) -> None:
    model, batch = make_model("classifier"), make_batch("classifier", 0)
    batch["x"].requires_grad_(True)
    _, logits = model(**batch)
    (logits * torch.sin(torch.arange(ROWS * 7.0)).reshape(ROWS, 7)).sum().backward()
    results = run(team, plan, jobs.from_logits)
    for mode, got, gradients, _ in results:
        assert mode == "split"
        torch.testing.assert_close(got, logits.detach(), rtol=1e-5, atol=1e-6)
        assert_same_gradients(gradients, model)
    torch.testing.assert_close(torch.cat([result[3] for result in results]), batch["x"].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_parts_run_alone_after_a_failure(team: Team, plan: str) -> None:
    model, batch = make_model("classifier"), make_batch("classifier", 0)
    features = model.features(batch["x"])
    inlet = model.inlet(batch["x"])
    inlet.sum().backward()
    for raised, got_features, got_inlet, gradients in run(team, plan, jobs.parts_of_a_model):
        assert "batch_size" in raised
        torch.testing.assert_close(got_features, features.detach())
        torch.testing.assert_close(got_inlet, inlet.detach())
        assert_same_gradients(gradients, model)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "shard=3"])
def test_the_next_forward_sees_new_weights(team: Team, plan: str) -> None:
    model, batch = make_model("gpt2"), make_batch("gpt2", 0)
    before = loss_of(model(**batch)).item()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    after = loss_of(model(**batch)).item()
    for losses in run(team, plan, jobs.edit_weights):
        assert losses == pytest.approx([before, before, after, after], rel=1e-5)


def test_a_parameter_may_be_unused_on_some_workers(team: Team) -> None:
    for gradients in team.run(3, jobs.some_workers_skip_a_parameter):
        assert gradients == {"all": [[12.0, 12.0]], "even": [[2.0, 2.0]], "none": None} or gradients == {
            "all": [[12.0, 12.0]],
            "even": None,
            "none": None,
        }


def test_a_gradient_may_be_written_twice_in_one_backward(team: Team) -> None:
    layer = jobs.shared_layer()
    (jobs.through_checkpoints(layer, 0) + jobs.through_checkpoints(layer, 1)).backward()
    for gradient in team.run(2, jobs.written_twice):
        torch.testing.assert_close(gradient, layer.weight.grad)


@pytest.mark.parametrize("plan", ["replicate=1,precision=bf16", "replicate=2,precision=bf16", "shard=2,precision=bf16"])
def test_bf16_computes_low_and_answers_in_float32(team: Team, plan: str) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        mode, dtypes, losses[precision] = run(team, plan.replace("bf16", precision), jobs.bf16)[0]
        assert (mode, dtypes) == ("split", {torch.float32})
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["bf16"] != losses["fp32"]


@pytest.mark.parametrize("plan", ["replicate=2,precision=bf16", "shard=2,micro_batches=2,precision=bf16"])
def test_logits_stay_in_bf16_and_are_promised_in_float32(team: Team, plan: str) -> None:
    for mode, held, promised in run(team, plan, jobs.held_logits):
        assert mode == "split"
        assert held == [torch.float32, torch.bfloat16]
        assert promised == [torch.float32, torch.float32]


@pytest.mark.parametrize("world, per_host", [(4, 2), (6, 3), (4, 1), (4, 4)])
def test_sums_through_hosts(team: Team, world: int, per_host: int) -> None:
    model = jobs.blocks_model()
    for step in range(2):
        for rank in range(world):
            jobs.blocks_loss(model, rank, step).backward()
    found = team.run(world, jobs.sum_through_hosts, per_host=per_host)
    for gradients, _ in found:
        assert_same_gradients(gradients, model)
        for name, gradient in gradients.items():  # all replicas have the same bits
            assert gradient is None or torch.equal(gradient, found[0][0][name]), name
    is_several = 1 < per_host < world
    trained = sum(p.numel() for p in model.parameters())
    for _, summed in found:
        assert {members for members, _ in summed} == {world // per_host if is_several else world}
        elements = sum(size for _, size in summed) * (per_host if is_several else 1)
        assert 2 * trained < elements < 2.95 * trained, "two steps, and what the one that failed had started"
