"""Parameters, gradients and optimizer state in host memory (`offload=all`): numbers of one device, and what lies where.

On CPU workers host and device are one memory, and FSDP2's policy for parameters in host memory runs there too.
"""

from __future__ import annotations

import copy
from typing import Any

import parallelizer_jobs as jobs
import pytest
import torch
from one_line_models import OwnTransformer, ragged_batches, tiny_gpt2, tiny_llama
from parallelizer_team import Team
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from moreh_ap.device import disable
from moreh_ap.errors import PlanError, UnsupportedError
from moreh_ap.parallelizer.data.fsdp import fsdp_modules, keeps_parameters_on_host, param_groups
from moreh_ap.plan import Plan

pytestmark = pytest.mark.rotating  # the same under one more plan each

PLANS = [
    "offload=all",
    "micro_batches=2,recompute=full,offload=all",
    "shard=2,offload=all",
    "shard=2,micro_batches=2,offload=all",
    "replicate=2,micro_batches=2,offload=all",
    "replicate=2,shard=2,micro_batches=2,offload=all",
]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, accelerator: Any) -> str:
    accelerator(request.param)
    return request.param


def on_both(script: Any) -> list[Any]:
    """Returns what `script(device)` gives in one process, and under the plan."""
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        results.append(script(device))
    return results


def assert_same(expected: Any, got: Any) -> None:
    torch.testing.assert_close(got, expected, **TOLERANCE)


def on_host(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def batches(device: str, count: int = 4, rows: int = 6) -> list[dict[str, Tensor]]:
    return [{name: value.to(device) for name, value in one.items()} for one in ragged_batches(count, rows)]


def test_twenty_steps_give_the_losses_and_weights_of_one_process(plan: str) -> None:
    def script(device: str) -> tuple[list[float], dict[str, Tensor]]:
        model = tiny_llama().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        losses = []
        for batch in batches(device, 20):
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [loss.item() for loss in losses], on_host(model)

    (losses, weights), (got, others) = on_both(script)
    assert got == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        assert (others[name] - weight).abs().max() < 1e-4 * weight.abs().max().clamp(min=1e-12), name


def test_accumulation_clipping_schedules_and_frozen_weights(plan: str) -> None:
    def script(device: str) -> Any:
        model = OwnTransformer().to(device)
        next(model.parameters()).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        trace = []
        for _ in range(3):
            for batch in batches(device, 3):
                (model(batch["input_ids"], batch["labels"])[1] / 3).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()
            gradients = {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
            trace.append((norm.item(), gradients))
            optimizer.zero_grad()
        next(model.parameters()).requires_grad_(True)
        model(batch["input_ids"], batch["labels"])[1].backward()
        optimizer.step()
        return trace, on_host(model)

    assert_same(*on_both(script))


def test_optimizers_whose_operations_run_one_by_one(plan: str) -> None:
    class Signs(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-2})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.5)
                    parameter.add_(torch.tanh(100 * state["mean"]), alpha=-group["lr"])

    def script(device: str) -> Any:
        model = tiny_gpt2().to(device)
        optimizer = Signs(model.parameters())
        for batch in batches(device, 3):
            model(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return on_host(model)

    assert_same(*on_both(script))


def test_a_scaler_of_gradients(plan: str) -> None:
    def script(device: str) -> Any:
        model = tiny_gpt2().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, fused=True)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        for turn, batch in enumerate(batches(device, 3)):
            scaler.scale(model(**batch, use_cache=False).loss * (float("inf") if turn == 1 else 1.0)).backward()
            if turn == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), on_host(model)

    assert_same(*on_both(script))


def test_weights_and_states_saved_loaded_and_written_in_place(plan: str) -> None:
    def script(device: str) -> Any:
        model = tiny_llama().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        saved: list[Any] = []
        for batch in batches(device, 4):
            model(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            saved.append((on_host(model), copy.deepcopy(optimizer.state_dict())))
            if len(saved) == 3:
                model.load_state_dict(saved[0][0])
                optimizer.load_state_dict(saved[0][1])
                with torch.no_grad():
                    model(**batch, use_cache=False)  # reads the weights that are written next
                    model.lm_head.weight.mul_(0.5)
        states = optimizer.state_dict()["state"]
        return on_host(model), {index: state["exp_avg"].cpu() for index, state in states.items()}

    assert_same(*on_both(script))


def test_evaluation_and_generation(plan: str) -> None:
    def script(device: str) -> Any:
        model = tiny_llama().to(device)
        (batch,) = batches(device, 1)
        model(**batch, use_cache=False).loss.backward()
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.cpu()
        tokens = model.generate(batch["input_ids"][:2, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
        return logits, tokens.cpu()

    assert_same(*on_both(script))


def test_tied_weights_stay_one_tensor_with_one_state(plan: str) -> None:
    def script(device: str) -> Any:
        model = tiny_gpt2().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
        gradients = []
        for batch in batches(device, 3):
            model(**batch, use_cache=False).loss.backward()
            gradients.append(model.lm_head.weight.grad.cpu().clone())
            optimizer.step()
            optimizer.zero_grad()
        assert model.lm_head.weight is model.transformer.wte.weight
        saved = on_host(model)
        assert torch.equal(saved["lm_head.weight"], saved["transformer.wte.weight"])
        return len(optimizer.state_dict()["state"]), gradients, saved

    assert_same(*on_both(script))


def test_bf16_plans_keep_the_loss_curve(accelerator: Any) -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = tiny_llama().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        found = []
        for batch in batches(device, 10):
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    disable()
    wanted = losses("cpu")
    for plan in ("precision=bf16,offload=all", "shard=2,micro_batches=2,recompute=full,precision=bf16,offload=all"):
        accelerator(plan)
        got = losses("cuda")
        assert got == pytest.approx(wanted, rel=0.02)
        assert got != wanted


def test_second_derivatives_are_refused_with_a_plan_that_has_them(accelerator: Any) -> None:
    accelerator("offload=all")
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to("cuda")
    values = torch.randn(3, 4, device="cuda", requires_grad=True)
    with pytest.raises(UnsupportedError, match='plan="offload=optimizer"') as caught:
        torch.autograd.grad(model(values).sum(), values, create_graph=True)
    assert len(str(caught.value).splitlines()) == 4


def placed(rank: int, world: int, plan: str) -> dict[str, Any]:
    """Trains two steps; returns what is where between steps, and what is on the device while a block computes."""
    sizes = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, use_cache=False
    )
    runner = jobs.Runner(LlamaForCausalLM(sizes), Plan.parse(plan))
    groups = [group for one in fsdp_modules(runner.model) for group in param_groups(one)]
    params = [param for group in groups for param in group.fsdp_params]
    most = [0]

    def note(*_: Any) -> None:
        whole = [param._unsharded_param for group in groups if group.is_unsharded for param in group.fsdp_params]
        most[0] = max(most[0], sum(param.numel() for param in whole))

    for group in groups:
        inner = group.post_backward
        group.post_backward = lambda *args, inner=inner: (note(), inner(*args))
    ids = torch.arange(8 * world * 6).view(8 * world, 6) % 64
    for _ in range(2):
        forward = runner.call({"input_ids": ids, "labels": ids})
        forward.backward(runner.loss_gradient(forward))
    return {
        "policy": all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups),
        "pinned": any(param.pin_memory for param in params),
        "host": keeps_parameters_on_host(runner.model),
        "offloaded": all(param.offload_to_cpu for param in params),
        "devices": {str(param.sharded_param.to_local().device) for param in params}
        | {str(param.sharded_param.grad.to_local().device) for param in params},
        "managed": {id(param.sharded_param) for param in params} == {id(p) for p in runner.model.parameters()},
        "gathered": sum(group.is_unsharded for group in groups),
        "partial": [group._partial_reduce_output for group in groups],
        "most": most[0],
        "all": sum(p.numel() for p in runner.model.parameters()),
        "blocks": max(sum(p.numel() for p in block.parameters()) for block in runner.model.model.layers),
        "outside": sum(p.numel() for name, p in runner.model.named_parameters() if ".layers." not in name),
    }


@pytest.mark.parametrize("plan", ["offload=all", "replicate=2,shard=2,micro_batches=2,offload=all"])
def test_what_lies_where(team: Team, plan: str) -> None:
    for found in team.run(Plan.parse(plan).num_devices, placed, plan=plan):
        assert found["policy"] and found["host"] and found["offloaded"] and found["managed"]
        assert not found["pinned"]  # there is no GPU here that would copy from pinned memory
        assert found["devices"] == {"cpu"}
        assert found["gathered"] == 0
        assert found["partial"] == [None] * len(found["partial"])  # no sum waits for the last micro-batch
        assert 0 < found["most"] <= found["outside"] + 2 * found["blocks"] < found["all"]


def test_axes_that_keep_parameters_on_their_device_are_refused() -> None:
    for text in ("tensor=2,offload=all", "pipeline=2,offload=all"):
        with pytest.raises(PlanError, match="offload=all with") as caught:
            Plan.parse(text)
        assert len(str(caught.value).splitlines()) == 4
