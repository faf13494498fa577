"""What follows from a profile: parameters on a device, bytes kept, operations of a row."""

from __future__ import annotations

import pytest

from moreh_ap.planner.profiles.model_profile import LayerProfile, ModelProfile, Product

BLOCK = LayerProfile(
    parameters_split=800.0,
    parameters_replicated=40.0,
    products=(Product(10, 40, "outer"), Product(40, 10, "inner", share=2.0, copies=4.0)),
    attention_flops_per_row=600.0,
    kept_split_bytes_per_token=16.0,
    kept_replicated_bytes_per_token=8.0,
)
MODEL = ModelProfile("small", 6, 10, 3, LayerProfile(parameters_replicated=100.0), BLOCK, LayerProfile())


def test_a_product_multiplies_and_adds_once_for_each_weight_that_a_token_uses():
    assert [product.flops_per_token for product in BLOCK.products] == [800.0, 1600.0]
    assert BLOCK.product_flops_per_token == 2400.0


def test_the_tensor_axis_splits_some_parameters_and_leaves_the_others():
    assert [BLOCK.parameters_on_device(tensor) for tensor in (1, 2, 4)] == [840.0, 440.0, 240.0]


def test_sequence_parallelism_splits_activations_that_the_tensor_axis_leaves():
    assert BLOCK.kept_bytes_per_row(6, 1, False) == 6 * 24.0
    assert BLOCK.kept_bytes_per_row(6, 2, False) == 6 * 16.0
    assert BLOCK.kept_bytes_per_row(6, 2, True) == 6 * 12.0


def test_a_model_is_its_ends_and_its_blocks():
    assert MODEL.parameters == 100.0 + 3 * 840.0
    assert MODEL.boundary_bytes_per_row == 2.0 * 10 * 6
    assert MODEL.flops_per_row == pytest.approx(3.0 * (3 * 2400.0 * 6 + 3 * 600.0)), "a backward is two forwards"
