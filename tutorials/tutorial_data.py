"""Data of the tutorials: where it comes from, and how a row becomes tokens.

Decides the prompt's form, the split into training and held-out rows, and the folders of the embedded defaults. Knows
nothing of the accelerator: it runs once, in the user's process, like any other preprocessing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from datasets import DatasetDict, load_dataset, load_from_disk

EMBEDDED_MODEL = "smollm2-135m-instruct"
EMBEDDED_DATASET = "python-functions"
PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"
HELD_OUT_ROWS = 256


def embedded_folder(name: str) -> str:
    """Returns the folder of an embedded model or data set, in `MOREH_AP_CACHE` or `~/.cache/moreh_ap`.

    Raises:
        SystemExit: It has not been prepared; the message says how.
    """
    cache = Path(os.environ.get("MOREH_AP_CACHE") or "~/.cache/moreh_ap").expanduser()
    if not (cache / name).is_dir():
        raise SystemExit(f"{cache / name} does not exist; prepare it with: python scripts/prepare_tutorial.py")
    return str(cache / name)


def load_rows(name_or_path: str) -> DatasetDict:
    """Returns a data set with columns `instruction` and `output` and parts `train` and `test`.

    Args:
        name_or_path: A folder written by `save_to_disk`, or a name on the Hugging Face hub. Where there is no `test`
            part, `HELD_OUT_ROWS` rows of `train` (at most a tenth) become one, always the same.
    """
    rows = load_from_disk(name_or_path) if Path(name_or_path).is_dir() else load_dataset(name_or_path)
    if "test" not in rows:
        held_out = max(1, min(HELD_OUT_ROWS, len(rows["train"]) // 10))
        rows = rows["train"].train_test_split(test_size=held_out, seed=0)
    return rows


def tokenize(rows: DatasetDict, tokenizer: Any, block_size: int) -> DatasetDict:
    """Returns `rows` as `input_ids` and `attention_mask`, each row cut or padded to `block_size` tokens."""

    def preprocess(row: dict[str, str]) -> dict[str, list[int]]:
        text = PROMPT.format(instruction=row["instruction"]) + row["output"] + tokenizer.eos_token
        encoded = tokenizer(text, truncation=True, max_length=block_size, padding="max_length")
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}

    return rows.map(preprocess, remove_columns=rows["train"].column_names, desc="Tokenizing")
