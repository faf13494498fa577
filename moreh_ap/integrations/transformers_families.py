"""Small models of transformers' families, for verifying plans: from a name, or from a folder with a configuration.

Decides which class a configuration is trained with. What is made small is in `transformers_reduced`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moreh_ap.integrations.transformers_reduced import reduce_config

_SEQUENCE_TO_SEQUENCE, _CLASSIFICATION = "AutoModelForSeq2SeqLM", "AutoModelForSequenceClassification"
FAMILIES = {
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "mistral": "AutoModelForCausalLM",
    "qwen2": "AutoModelForCausalLM",
    "qwen3": "AutoModelForCausalLM",
    "opt": "AutoModelForCausalLM",
    "gpt_neox": "AutoModelForCausalLM",
    "gemma": "AutoModelForCausalLM",
    "phi3": "AutoModelForCausalLM",
    "mixtral": "AutoModelForCausalLM",
    "bert": _CLASSIFICATION,
    "t5": _SEQUENCE_TO_SEQUENCE,
}
"""The families that have a name here, and what each is trained as."""
HEADS, KEY_VALUE_HEADS = 4, 2
_ONE_KEY_VALUE_HEAD = ("gemma",)


def configuration_of(model: str) -> tuple[Any, str]:
    """Returns the configuration of a family's name, a folder or a file, and the class to train it with.

    Raises:
        OSError, ValueError: The file is missing, or is no configuration that transformers knows.
    """
    import transformers

    if model in FAMILIES:
        return _family(model), FAMILIES[model]
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    settings = json.loads(file.read_text(encoding="utf-8"))
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    named = (settings.get("architectures") or [""])[0]
    return config, named if hasattr(transformers, named) else "AutoModelForCausalLM"


def _family(name: str) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(name)
    config.num_attention_heads = HEADS
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = 1 if name in _ONE_KEY_VALUE_HEAD else KEY_VALUE_HEADS
    elif name == "llama":
        config.num_key_value_heads = KEY_VALUE_HEADS
    return config


Calls = tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
"""Positional and keyword arguments of a call for each step."""


def model_and_calls(model: str, rows: int, length: int, depth: int, steps: int) -> tuple[nn.Module, Calls]:
    """Returns a small model of a family, and a call with a batch of its own for each step, rows padded differently.

    Args:
        model: A family's name, a folder with a `config.json`, or that file.
        rows: Rows of a batch.
        length: Positions of a row.
        depth: Blocks.
        steps: Number of calls.

    Raises:
        OSError, ValueError: The file is missing, or is no configuration that transformers knows.
    """
    import transformers

    config, class_name = configuration_of(model)
    small = reduce_config(config, depth, length)
    if getattr(config, "is_encoder_decoder", False) and getattr(small, "decoder_start_token_id", None) is None:
        small.decoder_start_token_id = 0  # transformers leaves it to checkpoints
    with torch.random.fork_rng(devices=[]):
        if class_name.startswith("Auto"):
            module = getattr(transformers, class_name).from_config(small)
        else:
            module = getattr(transformers, class_name)(small)
    is_classification = "SequenceClassification" in type(module).__name__
    num_labels = small.num_labels if is_classification else 0
    calls = tuple(((), batch(step, rows, length, small.vocab_size, num_labels)) for step in range(steps))
    return module, calls


def batch(step: int, rows: int, length: int, vocabulary: int, num_labels: int = 0) -> dict[str, Tensor]:
    """Returns ids, mask and labels of a step (B, T); the first row is full, every other padded differently.

    Args:
        num_labels: Classes, where a row has one label; 0 where every position has one.
    """
    generator = torch.Generator().manual_seed(100 + step)
    ids_BT = torch.randint(3, vocabulary, (rows, length), generator=generator)
    lengths_B = torch.tensor([length if row == 0 else 2 + (3 * row + 5 * step) % (length - 1) for row in range(rows)])
    mask_BT = (torch.arange(length) < lengths_B[:, None]).long()
    if num_labels:
        labels = torch.arange(rows) % num_labels
    else:
        labels = ids_BT.masked_fill(mask_BT == 0, -100)
    return {"input_ids": ids_BT * mask_BT, "attention_mask": mask_BT, "labels": labels}
