"""What the tutorial scripts read, in a size for tests: models with random weights, rows in the embedded form.

Must not know the scripts. Dropout is 0 everywhere, since under another plan other elements would be dropped.
"""

from __future__ import annotations

from pathlib import Path

import torch
from user_files import make_files

NUM_ROWS = 26


def make_tutorial_files(folder: Path) -> None:
    """Writes `gpt`, `llama`, `functions` and `summaries` into `folder`; always the same."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    make_files(folder / "users")
    tokenizer = AutoTokenizer.from_pretrained(folder / "users" / "gpt")
    words = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = {
            "gpt": GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256, **words, **no_dropout)),
            "llama": LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=8,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=128,
                    **words,
                )
            ),
        }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    numbers = range(NUM_ROWS)
    _save(folder / "functions", {
        "instruction": [f"add {n} to {n}" for n in numbers],
        "output": [f"print({n} + {n})\n" * (1 + n % 3) for n in numbers],
    })  # fmt: skip
    _save(folder / "summaries", {
        "article": [f"There are {n} apples. " * (1 + n % 4) for n in numbers],
        "highlights": [f"{n} apples." for n in numbers],
        "id": [str(n) for n in numbers],
    })  # fmt: skip


def _save(folder: Path, columns: dict[str, list[str]]) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_dict(columns)
    DatasetDict(
        {"train": rows.select(range(NUM_ROWS - 6)), "test": rows.select(range(NUM_ROWS - 6, NUM_ROWS))}
    ).save_to_disk(folder)
