"""Rows of models with experts: their shape by name, experts that are dealt over devices, and what that adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.evaluation import predictions, run_table
from moreh_ap.evaluation.accuracy import evaluate
from moreh_ap.evaluation.expert_parallelism import all_to_all_s, state_bytes
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.cost.training_systems import TUNED_FSDP, TUNED_MEGATRON
from moreh_ap.planner.profiles.known_models import find_model
from moreh_ap.planner.profiles.transformer_shape import profile_of

NAMED = {
    "source": "Megatron-Bridge", "model": "Qwen3_30B_a3B (tokendrop)", "seq_len": "4096",
    "global_batch_sequences": "512", "gpu": "H100-80GB-SXM", "n_gpus": "16", "gpus_per_node": "8", "precision": "bf16",
    "dp": "16", "fsdp": "1", "tp": "1", "cp": "1", "pp": "1", "ep": "8", "micro_batch": "1",
    "tokens_per_s_per_gpu": "10000", "hidden": "", "n_layers": "", "n_params_b": "", "notes": "",
}  # fmt: skip
QWEN = find_model("Qwen3-30B-A3B").shape
ONE_EXPERT = 3 * QWEN.hidden * QWEN.ffn_hidden


def test_a_row_without_widths_has_those_of_the_model_that_it_names():
    run = run_table.run_of(NAMED)
    assert run.profile.num_blocks == 48
    assert run.profile.flops_per_row == profile_of(QWEN, 4096).flops_per_row
    assert run.experts is not None
    assert (run.experts.degree, run.experts.layers, run.experts.width, run.experts.taken) == (8, 48, 2048, 8)


def test_a_row_with_an_unknown_name_says_what_is_missing():
    with pytest.raises(OptionError, match="hidden is blank") as caught:
        run_table.run_of(NAMED | {"model": "Colossus 1T"})
    assert "known by its name" in caught.value.allowed


@pytest.mark.parametrize(
    ("change", "said"),
    [({"ep": ""}, "ep is blank"), ({"ep": "3"}, "ep=3 with 128 experts"), ({"ep": "64"}, "ep=64 with 128 experts")],
)
def test_a_mixture_needs_to_know_how_its_experts_are_dealt(change, said):
    with pytest.raises(OptionError, match=said):
        run_table.run_of(NAMED | change)


def test_a_device_holds_its_part_of_the_experts():
    whole, dealt = (run_table.run_of(NAMED | {"ep": ep}) for ep in ("1", "8"))
    assert whole.experts is None
    elsewhere = 48 * 128 * ONE_EXPERT * 7 / 8
    assert whole.profile.parameters - dealt.profile.parameters == pytest.approx(elsewhere)
    assert dealt.experts.parameters_elsewhere == pytest.approx(elsewhere)


def test_the_tensor_axis_deals_experts_too():
    run = run_table.run_of(NAMED | {"tp": "2", "dp": "8"})
    held = (run.profile.block.parameters_split / 2 - QWEN.hidden * 128 * (32 + 2 * 4 + 32) / 2) / ONE_EXPERT
    assert held == pytest.approx(128 / 8)  # 4 parts of them, each cut in two


def test_split_state_of_experts_is_what_it_is_without_dealing_them():
    """With everything split over all devices of the batch, a device holds the same wherever experts are."""
    axis = run_table.run_of(NAMED).experts
    sharded = state_bytes(axis, Plan(shard=16), TUNED_FSDP)
    assert sharded == pytest.approx((4.0 + 8.0 + 4.0) * axis.parameters_elsewhere / 16)
    optimizer_alone = state_bytes(axis, Plan(16), TUNED_MEGATRON.with_zero_stage(1))
    assert optimizer_alone == pytest.approx(12.0 * axis.parameters_elsewhere / 16)
    assert state_bytes(axis, Plan(16), TUNED_MEGATRON.with_zero_stage(0)) == 0.0


def test_a_token_goes_to_a_device_once():
    axis = run_table.run_of(NAMED).experts
    assert replace(axis, degree=2, taken=1).devices_per_token == pytest.approx(1.0)
    assert replace(axis, degree=2, taken=22).devices_per_token == pytest.approx(2.0, rel=1e-5)
    assert replace(axis, degree=10**6).devices_per_token == pytest.approx(axis.taken, rel=1e-4)


def test_tokens_travel_at_the_rate_of_the_narrowest_way():
    run = run_table.run_of(NAMED)
    system = replace(run.system, hides_tensor=0.0)
    inside = all_to_all_s(run.experts, run.profile, run.plan, 1, run.cluster, system)
    sent = 4096 * run.experts.devices_per_token * 2048 * 2.0 * 7 / 8
    latency = run.cluster.intra.latency_s
    assert inside == pytest.approx(4 * 48 * 32 * (sent / run.cluster.intra.bytes_per_s + latency))
    over_nodes = all_to_all_s(replace(run.experts, degree=16), run.profile, run.plan, 1, run.cluster, system)
    assert over_nodes > 2 * inside
    in_a_rack = all_to_all_s(
        replace(run.experts, degree=16), run.profile, run.plan, 1, find_cluster("16xGB200"), system
    )
    assert in_a_rack < inside


def test_predictions_have_what_the_axis_adds():
    dealt, alone = (predictions.predict(NAMED | {"ep": ep}) for ep in ("8", "1"))
    assert float(dealt["predicted_reserved_gib"]) < float(alone["predicted_reserved_gib"])
    run = run_table.run_of(NAMED)
    without = float(dealt["predicted_step_time_s"]) - all_to_all_s(
        run.experts, run.profile, run.plan, 1, run.cluster, run.system
    )
    assert 0.0 < without < float(dealt["predicted_step_time_s"])


def test_rows_that_only_name_their_model_are_judged_by_themselves():
    named = NAMED | {"predicted_tokens_per_s_per_gpu": "11000"}
    stated = named | {
        "model": "Llama3-8B", "hidden": "4096", "n_layers": "32", "ffn_hidden": "14336", "n_heads": "32",
        "n_kv_heads": "8", "vocab": "128256", "ep": "", "predicted_tokens_per_s_per_gpu": "13000",
    }  # fmt: skip
    found = evaluate([named, stated])
    assert (found["named_rows"], found["published_rows"], found["above_peak"]) == (1, 1, 0)
    assert found["named_median_abs_error"] == pytest.approx(0.1)
    assert found["published_median_abs_error"] == pytest.approx(0.3)
