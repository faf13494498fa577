"""What adapters add to a model whose weights are frozen: parameters, state, time; how weights are kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.memory_footprint import estimate_memory
from moreh_ap.planner.cost.training_systems import MOREH_AP
from moreh_ap.planner.profiles.adapters import FROZEN_WEIGHTS, adapters_of, with_adapters
from moreh_ap.planner.profiles.known_models import find_model
from moreh_ap.planner.profiles.transformer_shape import profile_of

SYSTEM = replace(MOREH_AP, trains_weights=False)
LORA_OF_LLAMA2_7B = 39_976_960
"""What `print_trainable_parameters` of peft says of rank 16 beside every linear layer but the head."""


def adapted(frozen: str = "bf16", name: str = "Llama2-7B", rank: int = 16):
    shape = find_model(name).shape
    profile = profile_of(shape, 2048)
    return profile, with_adapters(profile, adapters_of(profile, shape, rank), FROZEN_WEIGHTS[frozen])


def test_adapters_have_as_many_parameters_as_those_of_peft():
    plain, found = adapted()
    assert found.num_blocks * found.block.trained_parameters == LORA_OF_LLAMA2_7B
    assert found.parameters == plain.parameters + LORA_OF_LLAMA2_7B
    small = found.block.product_flops_per_token - plain.block.product_flops_per_token
    assert small * found.num_blocks == 2 * LORA_OF_LLAMA2_7B


@pytest.mark.parametrize("plan", ["shard=8,precision=bf16", "replicate=8", "shard=8,micro_batches=4,precision=bf16"])
def test_only_adapters_have_gradients_and_state(plan):
    plain, found = adapted("fp32")
    devices = Plan.parse(plan).shard
    memory = estimate_memory(found, Plan.parse(plan), 32, SYSTEM)
    assert memory.optimizer_bytes == 8 * LORA_OF_LLAMA2_7B / devices
    assert memory.gradient_bytes == 4 * LORA_OF_LLAMA2_7B / devices
    assert memory.parameter_bytes == pytest.approx(4 * (plain.parameters + LORA_OF_LLAMA2_7B) / devices)
    trained = estimate_memory(plain, Plan.parse(plan), 32)
    assert memory.reserved_bytes < trained.reserved_bytes - 4 * plain.parameters / devices


def test_frozen_weights_are_counted_as_they_are_kept():
    plain, _ = adapted()
    one = Plan.parse("shard=8,precision=bf16")
    bytes_by_kind = {
        kind: estimate_memory(adapted(kind)[1], one, 8, SYSTEM).parameter_bytes * 8 - 4 * LORA_OF_LLAMA2_7B
        for kind in FROZEN_WEIGHTS
    }
    assert bytes_by_kind["fp32"] == pytest.approx(4 * plain.parameters)
    assert bytes_by_kind["bf16"] == pytest.approx(2 * plain.parameters)
    of_blocks = plain.num_blocks * plain.block.parameters
    assert bytes_by_kind["4bit"] == pytest.approx(
        0.5 * of_blocks + 2 * (plain.parameters - of_blocks) + 8 * 0.127 / 8 * of_blocks, rel=1e-3
    ), "each of eight devices has all constants"


def test_weights_of_4_bits_travel_as_they_are_and_one_matrix_at_a_time_is_unpacked():
    plan = Plan.parse("shard=8,precision=bf16,recompute=full")
    only_blocks = replace(SYSTEM, outer_unit_parameters=math.inf)  # so that both peaks are in a block's backward
    wide, packed = (estimate_memory(adapted(kind)[1], plan, 8, only_blocks) for kind in ("bf16", "4bit"))
    block = adapted()[0].block
    largest = max(one.inner * one.outer for one in block.products)
    saved = wide.temporary_bytes - packed.temporary_bytes
    assert saved == pytest.approx(2 * (2 - 4 / 8) * block.parameters - 2 * largest, rel=1e-3)


def test_a_rank_of_zero_is_refused():
    plain, _ = adapted()
    with pytest.raises(OptionError, match="adapters of rank 0"):
        adapters_of(plain, find_model("Llama2-7B").shape, 0)
