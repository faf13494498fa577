"""Tensor parallelism gives the losses, gradients and weights of the plain model, or refuses."""

from __future__ import annotations

from typing import Any

import pytest
import tensor_jobs as jobs
import tensor_vocabulary_jobs as vocabulary_jobs
import torch
from families import VOCABULARY
from parallelizer_team import Team

pytestmark = pytest.mark.rotating  # one more family each

FAMILIES = [
    "gpt2", "llama2", "llama3", "mistral", "qwen2", "qwen3", "opt", "gpt_neox", "gemma", "phi3", "mixtral",
    "qwen3_moe", "bert", "t5", "own_transformer", "nanogpt",
]  # fmt: skip
LOSS, GRADIENT, LATER_GRADIENT, WEIGHT = 1e-6, 1e-5, 1e-4, 3e-4
"""Largest relative differences. Later gradients and weights come after AdamW, which divides noise by its own size."""
SEQUENCES = [
    (2, "gpt2"), (2, "own_transformer"), (2, "opt"), (2, "bert"), (2, "mixtral"), (4, "llama3"), (4, "qwen3"),
    (4, "nanogpt"),
]  # fmt: skip


def _check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["losses"] <= LOSS, result
        assert result["first_gradients"] <= GRADIENT and result["gradients"] <= LATER_GRADIENT, result
        assert result["weights"] <= WEIGHT, result
        assert result["tied"], "a tied parameter became two"


def _check_layouts(results: list[dict[str, Any]]) -> None:
    """Every element of a split parameter has exactly one rank that writes it."""
    for name, first in results[0]["layouts"].items():
        written = torch.zeros(first.shape, dtype=torch.int)
        for result in results:
            layout = result["layouts"][name]
            for there, _ in layout.pieces() if layout.writes else []:
                written[there] += 1
        assert bool((written == 1).all()), name


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_train_like_one(team: Team, name: str) -> None:
    results = team.run(2, jobs.train, name=name, sequence_parallel=False)
    _check(results)
    _check_layouts(results)
    assert results[0]["elements"] < (0.7 if name == "own_transformer" else 0.56)
    assert results[0]["decisions"] == results[1]["decisions"]


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2", "qwen3", "gemma", "phi3", "mixtral", "bert", "nanogpt"])
def test_four_ranks_train_like_one(team: Team, name: str) -> None:
    """With two key-value heads, or one: ranks share them."""
    results = team.run(4, jobs.train, name=name, sequence_parallel=False)
    _check(results)
    _check_layouts(results)


@pytest.mark.parametrize(("world", "name"), SEQUENCES)
def test_sequences_split(team: Team, world: int, name: str) -> None:
    """nanoGPT's sequences have 11 tokens: ranks have 3, 3, 3 and 2 of them."""
    results = team.run(world, jobs.train, name=name, sequence_parallel=True)
    _check(results)
    assert any("along the sequence" in line for line in results[0]["decisions"])


@pytest.mark.parametrize("name", ["llama3", "gpt2", "nanogpt"])
def test_attention_is_split_by_heads(team: Team, name: str) -> None:
    (result, _) = team.run(2, jobs.train, name=name, sequence_parallel=False)
    assert any("heads" in line and "tried on one device" in line for line in result["decisions"]), result["decisions"]


def test_whole_logits_never_exist(team: Team) -> None:
    for operations, shapes in team.run(2, vocabulary_jobs.shapes_of_training, name="llama3", split=True):
        assert operations > 100 and shapes == []
    ((_, plain_shapes),) = team.run(1, vocabulary_jobs.shapes_of_training, name="llama3", split=False)
    assert any(shape[-1] == VOCABULARY for shape in plain_shapes), "the eye does not see"


@pytest.mark.parametrize("world", [2, 4])
def test_every_form_of_the_cross_entropy(team: Team, world: int) -> None:
    for found in team.run(world, vocabulary_jobs.cross_entropies):
        assert {name: error for name, error in found.items() if not error <= 1e-5} == {}


@pytest.mark.parametrize("world", [2, 4])
def test_split_logits_may_be_used_for_anything(team: Team, world: int) -> None:
    for found in team.run(world, vocabulary_jobs.operations):
        assert {name: error for name, error in found.items() if not error <= 1e-5} == {}


def test_padding_rows_get_no_gradient(team: Team) -> None:
    for found in team.run(2, vocabulary_jobs.padding_rows):
        assert max(found) <= GRADIENT, found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_scripts_do(team: Team, sequence_parallel: bool) -> None:
    for found in team.run(2, jobs.uses, sequence_parallel=sequence_parallel):
        assert {name: error for name, error in found.items() if not error <= 1e-5} == {}


def test_dropout_masks(team: Team) -> None:
    """Whole tensors are masked alike on all ranks, heads differently; the common random numbers go on as one."""
    first, second = team.run(2, jobs.dropout_masks, sequence_parallel=False)
    assert len(first["hidden"]) == 5 and len(first["attention"]) == 2
    assert all(torch.equal(a, b) for a, b in zip(first["hidden"], second["hidden"], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first["attention"], second["attention"], strict=True))
    assert not torch.equal(*first["attention"]), "two blocks drew the same"
    assert first["next"] == second["next"] and first["loss"] == second["loss"]
    again, _ = team.run(2, jobs.dropout_masks, sequence_parallel=False)
    assert again["loss"] == first["loss"]
    other, _ = team.run(2, jobs.dropout_masks, sequence_parallel=False, seed=4)
    assert other["loss"] != first["loss"]


def test_dropout_masks_of_split_sequences(team: Team) -> None:
    first, second = team.run(2, jobs.dropout_masks, sequence_parallel=True)
    assert torch.equal(first["hidden"][0], second["hidden"][0]), "the embedding's, outside of blocks"
    inside = list(zip(first["hidden"][1:], second["hidden"][1:], strict=True))
    assert len(inside) == 4 and not any(torch.equal(a, b) for a, b in inside)
    assert inside[0][0].shape[1] == 6, "half of the tokens"
    assert first["next"] == second["next"] and first["loss"] == second["loss"]


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_with_a_data_axis(team: Team, name: str) -> None:
    assert max(team.run(4, jobs.with_data_axis, name=name)) <= GRADIENT


@pytest.mark.parametrize("name", ["gpt2", "phi3", "qwen3"])
def test_on_meta(team: Team, name: str) -> None:
    for verdict in team.run(4, jobs.on_meta, name=name):
        assert all(verdict.values()), verdict


def test_heads_that_cannot_be_split(team: Team) -> None:
    (text, *_) = team.run(4, jobs.refusal, name="llama2", num_attention_heads=2, num_key_value_heads=2)
    assert "2 heads" in text and "tensor=1 or 2" in text and 'plan="tensor=2"' in text
    (text, *_) = team.run(2, jobs.refusal, name="llama2", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    assert "6 heads, 3 of them" in text and "tensor=1 or 3 or 6" in text


def test_nothing_to_split(team: Team) -> None:
    (text, _) = team.run(2, jobs.refusal, name="convnet")
    assert "tensor=2 would split nothing of this ConvNet" in text


def test_sequences_that_cannot_be_split(team: Team) -> None:
    (text, _) = team.run(2, jobs.refusal, name="t5", sequence_parallel=True)
    assert "encoder-decoder" in text


def test_names_are_not_believed(team: Team) -> None:
    for found in team.run(2, jobs.odd_model):
        assert found["difference"] <= GRADIENT
        assert not any("heads" in line or "inner features" in line for line in found["decisions"]), found["decisions"]
        assert any("gathered" in line for line in found["decisions"])
