"""What the planner is told of a model: its configuration where that can be believed, else what the module counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.planner.profiles.transformer_shape import profile_of
from moreh_ap.session.planning.model_profiling import profile_model, shape_of

transformers = pytest.importorskip("transformers")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Own(nn.Module):
    """An embedding, equal blocks and a head, of which nothing but the modules says so."""

    def __init__(self, num_blocks: int, width: int = 32, vocabulary: int = 100, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def counted(module: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor):
    assert shape_of(module) is None
    return profile_model(
        module, None, (module, args, kwargs), len(next((one for one in (*args, *kwargs.values()) if one.ndim), [0]))
    )


IDS = torch.zeros(8, 16, dtype=torch.long)


@pytest.mark.parametrize("tied", [False, True])
def test_a_counted_model_has_the_module_s_parameters_blocks_and_products(tied):
    model = Own(5, tied=tied)
    found = counted(model, IDS)
    assert found.parameters == pytest.approx(count(model))
    assert (found.num_blocks, found.hidden, found.sequence_length, found.logits_per_token) == (5, 32, 16, 100)
    assert found.block.parameters == count(model.blocks[0])
    assert found.block.product_flops_per_token == 2 * 2 * 32 * 96
    assert found.last.product_flops_per_token == 2 * 32 * 100
    # the input of both products and their results, two bytes each
    assert found.block.kept_replicated_bytes_per_token == 2 * (32 + 96 + 96 + 32)
    assert found.block.selective_replicated_bytes_per_token == 2 * (96 + 32)


def test_a_model_without_blocks_is_one_part():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    found = counted(model, torch.zeros(6, 8))
    assert (found.num_blocks, found.sequence_length, found.logits_per_token) == (1, 1, 0)
    assert found.block.parameters == count(model) and found.parameters == count(model)
    assert found.last.products == ()


@pytest.mark.parametrize(
    ("first", "positions"),
    [
        (torch.zeros(6, 8), 1),
        (torch.zeros(6, 8, dtype=torch.long), 8),
        (torch.zeros(6, 8, 5), 8),
        (torch.zeros(6, 3, 4, 5), 20),
        (torch.zeros(6), 1),
    ],
)
def test_positions_of_a_row_follow_from_what_is_passed_first(first, positions):
    model = nn.Sequential(nn.Linear(8, 4))
    assert counted(model, torch.tensor(1.0), first).sequence_length == positions
    assert counted(model, first, mask=torch.zeros(6, 77)).sequence_length == positions
    assert counted(model).sequence_length == 1


def test_a_convolution_is_a_product_at_each_pixel():
    model = nn.Sequential(nn.Conv2d(3, 8, 5))
    found = counted(model, torch.zeros(2, 3, 10, 10))
    (product,) = found.block.products
    assert (product.inner, product.outer) == (3 * 5 * 5, 8)
    assert product.share == 0.36  # 6 x 6 of 10 x 10 pixels
    assert found.block.kept_replicated_bytes_per_token == pytest.approx(2 * (3 + 0.36 * 8))


def llama(**changes):
    numbers = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    numbers |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**numbers, **changes}))


def test_a_decoder_of_transformers_is_its_configuration():
    model = llama()
    shape = shape_of(model)
    assert shape is not None and (shape.num_layers, shape.num_kv_heads) == (3, 2)
    assert shape.parameters == count(model)
    assert profile_model(model, shape, (model, (), {"input_ids": IDS}), 8) == profile_of(shape, 16)


def test_a_configuration_that_the_weights_contradict_is_not_believed():
    model = llama()
    model.config.num_hidden_layers = 4
    assert shape_of(model) is None
    model = llama()
    model.lm_head = nn.Sequential(model.lm_head, nn.Linear(128, 512))
    assert shape_of(model) is None


def test_a_class_of_one_s_own_is_counted_whatever_its_configuration_says():
    class Mine(transformers.LlamaForCausalLM):
        pass

    assert shape_of(Mine(llama().config)) is None


def test_an_encoder_is_counted():
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    model = transformers.BertForSequenceClassification(config)
    found = profile_model(model, shape_of(model), (model, (), {"input_ids": IDS}), 8)
    assert found.num_blocks == 3 and found.parameters == pytest.approx(count(model), rel=0.02)


def test_a_picture_s_pixels_are_not_as_wide_as_there_are_classes():
    """Else each of 4,096 pixels of a row counts as a state of 1,000 values, of which norms keep copies."""
    blocks = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2))
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), *blocks, nn.Flatten(), nn.Linear(8 * 256, 1000))
    profile = profile_model(model, None, (model, (torch.zeros(4, 3, 64, 64),), {}), 4)
    assert profile.hidden == 1, "the last layer writes 1,000 values for 4,096 pixels"
    stack = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Sequential(*blocks), nn.Flatten(), nn.Linear(8 * 256, 1000))
    stacked = profile_model(stack, None, (stack, (torch.zeros(4, 3, 64, 64),), {}), 4)
    assert stacked.num_blocks == 2 and stacked.hidden == 1, "a block writes 8 values for each 16th pixel"
