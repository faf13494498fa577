"""What one layer of each kind costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap.planner.profiles.layers import AttentionCost, FeedForwardCost, StateSpaceCost, mean_of

HIDDEN = 64
ATTENTION = AttentionCost(8, 8, 8, 8)
FEED_FORWARD = FeedForwardCost(96)


def weights(profile):
    return sum(product.inner * product.outer * max(1.0, product.copies) for product in profile.products)


def test_attention_has_four_square_matrices_and_a_norm():
    profile = ATTENTION.profile(HIDDEN, False, 16, 16)
    assert (profile.parameters_split, profile.parameters_replicated) == (4 * HIDDEN**2, HIDDEN)
    assert profile.attention_flops_per_row == 16 * 16 * 2 * HIDDEN, "a causal mask leaves half"
    assert ATTENTION.profile(HIDDEN, False, 16, 32).attention_flops_per_row == 2 * profile.attention_flops_per_row


def test_fewer_heads_of_keys_and_values_make_one_product_narrower():
    shared = replace(ATTENTION, num_kv_heads=2).profile(HIDDEN, False, 16, 16)
    assert shared.parameters_split == (2 + 2 / 4) * HIDDEN**2
    assert shared.kept_split_bytes_per_token < ATTENTION.profile(HIDDEN, False, 16, 16).kept_split_bytes_per_token


def test_latent_attention_has_products_that_the_tensor_axis_does_not_split():
    profile = replace(ATTENTION, query_rank=16, kv_rank=16, shared_dim=4).profile(HIDDEN, False, 16, 16)
    assert [product.split for product in profile.products] == ["", "outer", "outer", "inner"]
    assert profile.products[0].outer == 16 + 16 + 4


def test_a_gate_is_a_third_matrix():
    gated, plain = (replace(FEED_FORWARD, gated=gated).profile(HIDDEN, False) for gated in (True, False))
    assert (gated.parameters_split, plain.parameters_split) == (3 * 96 * HIDDEN, 2 * 96 * HIDDEN)


def test_experts_multiply_parameters_and_a_token_uses_some_of_them():
    one, eight = FEED_FORWARD.profile(HIDDEN, False), replace(FEED_FORWARD, num_experts=8, experts_per_token=2)
    profile = eight.profile(HIDDEN, False)
    assert profile.parameters_split == 8 * one.parameters_split
    assert profile.product_flops_per_token == 2 * one.product_flops_per_token + 2 * HIDDEN * 8, "and the router"
    spread = replace(eight, spread=4).profile(HIDDEN, False)
    assert spread.parameters_split == 2 * one.parameters_split
    assert spread.product_flops_per_token == profile.product_flops_per_token


@pytest.mark.parametrize(
    "profile",
    [ATTENTION.profile(HIDDEN, False, 16, 16), FEED_FORWARD.profile(HIDDEN, False)],
)
def test_parameters_that_the_tensor_axis_splits_are_those_of_the_products(profile):
    assert profile.parameters_split == weights(profile)


def test_biases_are_few_and_stay_on_every_device():
    for layer in (ATTENTION.profile(HIDDEN, True, 16, 16), FEED_FORWARD.profile(HIDDEN, True)):
        assert HIDDEN < layer.parameters_replicated < 0.05 * layer.parameters_split


def test_a_state_space_takes_time_in_proportion_to_the_row():
    layer = StateSpaceCost(num_heads=8, head_dim=8, num_groups=1, state=16)
    short, long = (layer.profile(HIDDEN, False, length).attention_flops_per_row for length in (128, 1024))
    assert long == 8 * short


def test_the_mean_of_layers_costs_as_much_as_they_do():
    attention, dense = ATTENTION.profile(HIDDEN, False, 16, 16), FEED_FORWARD.profile(HIDDEN, False)
    both, half = mean_of([(attention, 1.0), (dense, 1.0)]), mean_of([(attention, 1.0), (dense, 0.5), (dense, 0.0)])
    assert both.parameters == attention.parameters + dense.parameters
    assert half.product_flops_per_token == attention.product_flops_per_token + dense.product_flops_per_token / 2
    assert half.attention_width == attention.attention_width
    assert len(half.products) == len(attention.products) + len(dense.products), "absent layers have no products"
