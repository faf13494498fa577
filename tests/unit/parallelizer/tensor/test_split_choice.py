"""What is split over the tensor axis, seen from the first of two ranks, and what stays whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from moreh_ap.errors import PlanError
from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.parallelizer.tensor.split_choice import Splitter


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield Crossing(init_device_mesh("cpu", (2,)))
    dist.destroy_process_group()


class FeedForward(nn.Module):
    """Inner features between an activation that may need all of them at once, and a residual."""

    def __init__(self, normed: bool = False, inner: int = 12) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, inner), nn.Linear(inner, 8)
        self.norm = nn.LayerNorm(inner) if normed else nn.ReLU()

    def forward(self, hidden):
        return hidden + self.down_proj(self.norm(self.up_proj(hidden)))


class Reading(FeedForward):
    """Reads a weight beside calling its layer."""

    def forward(self, hidden):
        return super().forward(hidden) + self.up_proj.weight.mean()


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module, vocabulary: int = 20, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(vocabulary, 8), nn.ModuleList(blocks)
        self.head = nn.Linear(8, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def split(model: nn.Module, crossing: Crossing) -> dict[str, int]:
    splitter = Splitter(model, crossing)
    splitter.run()
    return splitter.decisions


def test_a_guess_that_holds_on_one_device_splits_every_block(two_ranks):
    model = Model(FeedForward(), FeedForward())
    assert split(model, two_ranks) == {
        "FeedForward: 12 inner features split; tried on one device": 2,
        "Embedding: 20 rows of the vocabulary split": 1,
        "Linear: 20 rows of the vocabulary split": 1,
    }
    block = model.blocks[1]
    assert block.up_proj.weight.shape == (6, 8) and block.down_proj.weight.shape == (8, 6)
    assert model.head.weight.shape == (10, 8)


def test_a_guess_that_does_not_hold_leaves_each_layer_to_be_split_alone(two_ranks):
    decisions = split(Model(FeedForward(normed=True), FeedForward(normed=True)), two_ranks)
    assert decisions["Linear: blocks.*.up_proj: output features split and gathered"] == 2
    assert decisions["Linear: blocks.*.down_proj: output features split and gathered"] == 2
    assert not any("inner features" in line for line in decisions)


def test_layers_whose_weight_a_forward_reads_itself_stay_whole(two_ranks):
    model = Model(Reading(), Reading())
    decisions = split(model, two_ranks)
    assert model.blocks[0].up_proj.weight.shape == (12, 8)
    assert "Linear: blocks.*.up_proj: output features split and gathered" not in decisions


def test_a_router_is_too_narrow_to_be_split(two_ranks):
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.wide = nn.Linear(16, 3), nn.Linear(16, 4)

        def forward(self, hidden):
            return hidden * self.router(hidden).sum() + self.wide(hidden).sum()

    model = Model(Routed(), Routed())
    decisions = split(model, two_ranks)
    assert decisions["Linear: blocks.*.wide: output features split and gathered"] == 2
    assert model.blocks[0].router.weight.shape == (3, 16)


def test_tied_ends_of_the_vocabulary_are_split_together(two_ranks):
    model = Model(FeedForward(), FeedForward(), tied=True)
    assert split(model, two_ranks)["tied embedding and head: 20 rows of the vocabulary split"] == 1
    assert model.head.weight is model.embedding.weight


def test_a_vocabulary_stays_whole_where_it_is_too_small_or_something_else_uses_it(two_ranks):
    tiny = split(Model(FeedForward(), FeedForward(), vocabulary=1), two_ranks)
    assert tiny["Embedding: whole on every rank: 1 rows are too few for 2 ranks"] == 1
    model = Model(FeedForward(), FeedForward())
    model.shift = nn.Module()
    model.shift.weight = model.embedding.weight
    assert split(model, two_ranks)["Embedding: whole on every rank: something else uses its weight too"] == 1


def test_the_vocabulary_stays_whole_behind_a_forward_that_was_replaced(two_ranks):
    model = Model(FeedForward(), FeedForward())
    forward = model.forward
    model.forward = lambda ids: forward(ids) @ model.embedding.weight
    assert split(model, two_ranks)["Model: vocabulary whole on every rank: a forward was replaced"] == 1
    assert model.embedding.weight.shape == (20, 8)


def test_modules_of_pytorch_that_use_their_layers_weights_stay_whole(two_ranks):
    decisions = split(Model(nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)), two_ranks)
    assert (
        decisions["MultiheadAttention: whole on every rank: PyTorch's own module uses its layers' weights directly"]
        == 2
    )


def llama(**changes):
    transformers = pytest.importorskip("transformers")
    numbers = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    numbers |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng():
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**numbers, **changes}))


def test_attention_is_split_by_heads_and_its_cache_with_them(two_ranks):
    splitter = Splitter(llama(), two_ranks)
    splitter.run()
    (line,) = (line for line in splitter.decisions if "heads" in line)
    assert line.startswith("LlamaAttention: 4 heads, 2 for key and value, split;") and splitter.decisions[line] == 2
    heads, ranges, counts = splitter.cache()
    assert (heads, ranges, counts) == (2, ((0, 1),), True)


def test_heads_that_cannot_be_dealt_are_refused_with_the_axes_that_can(two_ranks):
    with pytest.raises(PlanError, match="it has 3 heads, 3 of them for key and value") as refused:
        split(llama(hidden_size=48, num_attention_heads=3, num_key_value_heads=3), two_ranks)
    assert refused.value.allowed == "tensor=1 or 3" and refused.value.fix == 'plan="tensor=1"'
