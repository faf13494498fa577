"""Models that read pictures and words, whose pictures lie one behind the other: each worker has those of its rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rotating import rotating_from
from test_one_line_training import assert_same, on_both
from torch import nn

WORDS, LENGTH = 64, 24
PICTURE, BEFORE, BEHIND = WORDS - 1, WORDS - 2, WORDS - 3
TEXT = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}

pytestmark = pytest.mark.timeout(240)


def qwen(version):
    """Patches of all pictures, beside the grid of each."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    sight = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
    if version == "Qwen2VL":
        sight |= {"embed_dim": 32, "mlp_ratio": 2}
    else:
        sight |= {"intermediate_size": 48, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
        sight |= {"num_position_embeddings": 16}
    tokens = {"image_token_id": PICTURE, "video_token_id": BEHIND - 1, "vision_start_token_id": BEFORE}
    text = {**TEXT, **HEADS, "rope_parameters": rope, **({} if version == "Qwen2VL" else {"head_dim": 8})}
    config = getattr(transformers, f"{version}Config")(
        text_config=text, vision_config=sight, vision_end_token_id=BEHIND, **tokens
    )
    return getattr(transformers, f"{version}ForConditionalGeneration")(config)


def gemma():
    """An entry a picture."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sight = {"num_hidden_layers": 2, "image_size": 16, "patch_size": 4, "vision_use_head": False, **SIGHT}
    tokens = {"image_token_index": PICTURE, "boi_token_index": BEFORE, "eoi_token_index": BEHIND}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={**TEXT, **HEADS, "head_dim": 8, "sliding_window": 16, "pad_token_id": 0},
            vision_config={"model_type": "siglip_vision_model", **sight},
            mm_tokens_per_image=4,
            **tokens,
        )
    )


def mistral():
    """An entry a picture, beside the size of each; results of which the size depends on those."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    sight = {"num_hidden_layers": 2, "image_size": 32, "patch_size": 4, "head_dim": 8, **SIGHT}
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=MistralConfig(**TEXT, **HEADS, head_dim=8),
            vision_config=PixtralVisionConfig(**sight),
            image_token_index=PICTURE,
            spatial_merge_size=2,
            vision_feature_layer=-1,
        )
    )


MODELS = {
    "patches": lambda: qwen("Qwen2VL"),
    "patches and deep features": lambda: qwen("Qwen3VL"),
    "an entry each": gemma,
    "sizes": mistral,
}


def batch(kind, device, seed, rows):
    """Words with up to two pictures in each row, some rows have none."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, BEHIND - 1, (rows, LENGTH), generator=draws)
    grids = []
    for row in ids:
        at = 1
        for _ in range(int(torch.randint(0 if len(grids) > 1 else 1, 3, (1,), generator=draws))):
            sides = torch.randint(1, 3, (2,), generator=draws) if kind != "an entry each" else torch.tensor([2, 2])
            tokens = int(sides.prod())
            row[at], row[at + 1 : at + 1 + tokens], row[at + 1 + tokens] = BEFORE, PICTURE, BEHIND
            grids.append([1, *(2 * sides).tolist()])
            at += tokens + 2
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found["labels"] = ids.masked_fill(ids >= BEHIND, -100)
    grids = torch.tensor(grids)
    if kind.startswith("patches"):
        found["pixel_values"] = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4, generator=draws)
        found["image_grid_thw"], found["mm_token_type_ids"] = grids, (ids == PICTURE).int()
    else:
        found["pixel_values"] = torch.randn(len(grids), 3, 16, 16, generator=draws)
    if kind == "an entry each":
        found["token_type_ids"] = (ids == PICTURE).long()
    if kind == "sizes":
        found["image_sizes"] = 4 * grids[:, 1:]
    return {name: value.to(device) for name, value in found.items()}


def train(kind, device, own_loss=False, rows=(6, 5, 6, 6)):
    model = MODELS[kind]().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    trace = []
    for seed, number in enumerate(rows):
        given = batch(kind, device, seed, number)
        labels = given.pop("labels") if own_loss else None
        outputs = model(**given, use_cache=False)
        loss = outputs.loss
        if labels is not None:
            loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        trace.append((loss, nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        trace.append(model(**given).logits)
    return trace


@pytest.mark.parametrize("kind", rotating_from(1, MODELS))
def test_rows_are_split_with_their_pictures(accelerator, kind):
    accelerator("replicate=2", strict=True)
    assert_same(*on_both(lambda device: train(kind, device)), rtol=1e-4, atol=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize("plan", ["shard=2", "replicate=2,recompute=full", "shard=3,recompute=selective"])
@pytest.mark.parametrize("kind", MODELS)
def test_under_other_plans_with_a_loss_of_the_script(accelerator, plan, kind):
    accelerator(plan, strict="3" not in plan)  # of three devices some have rows without pictures only
    assert_same(*on_both(lambda device: train(kind, device, own_loss=True)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", rotating_from(1, ["replicate=2", "replicate=1"]))
def test_sizes_of_results_that_depend_on_pictures(accelerator, plan):
    """Calls whose arguments have equal sizes, on one device and where there are fewer rows than devices."""
    accelerator(plan)

    def script(device):
        model = MODELS["sizes"]().to(device)
        ids = torch.arange(1, LENGTH + 1, device=device)[None].repeat(1, 1)
        pixels, trace = torch.randn(2, 3, 16, 16).to(device), []
        for sizes in ([[16, 16], [8, 8]], [[16, 8], [8, 8]], [[8, 16], [16, 16]]):
            tokens = sum(height * width for height, width in sizes) // 64
            words = ids.clone()
            words[0, 2 : 2 + tokens] = PICTURE
            outputs = model(
                input_ids=words, labels=words, pixel_values=pixels, image_sizes=torch.tensor(sizes).to(device)
            )
            outputs.loss.backward()
            trace.append((outputs.loss, torch.cat(list(outputs.image_hidden_states))))
        return trace

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


@pytest.mark.rotating
def test_layers_may_be_split(accelerator):
    accelerator("tensor=2")
    assert_same(*on_both(lambda device: train("patches", device)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", rotating_from(1, ["replicate=2", "shard=2"]))
def test_as_many_pictures_as_rows_by_chance(accelerator, plan):
    """Batches of one form: where each row has one picture they are ordinary rows, and where it has not they are not."""
    accelerator(plan, strict=True)

    def script(device):
        model, trace = gemma().to(device), []
        for seed, counts in enumerate(([1, 1, 1, 1], [1, 1, 1, 1], [2, 0, 1, 1], [2, 1, 1, 0], [1, 1, 1, 1])):
            draws = torch.Generator().manual_seed(seed)
            ids = torch.randint(1, BEHIND - 1, (len(counts), LENGTH), generator=draws)
            for row, count in zip(ids, counts):
                row[1 : 1 + 4 * count] = PICTURE
            given = {"input_ids": ids, "pixel_values": torch.randn(4, 3, 16, 16, generator=draws)}
            given |= {"labels": ids.masked_fill(ids == PICTURE, -100), "token_type_ids": (ids == PICTURE).long()}
            loss = model(**{name: value.to(device) for name, value in given.items()}).loss
            loss.backward()
            trace.append(loss.detach())
        return [*trace, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
