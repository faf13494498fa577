"""Data of the tutorials: where it comes from, and how a row becomes tokens.

Decides the forms of the prompts, the split into training and held-out rows, and the folders of the embedded defaults.
Knows nothing of the accelerator: it runs once, in the user's process, like any other preprocessing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

EMBEDDED_MODEL = "smollm2-135m-instruct"
EMBEDDED_CONFIG = "gpt2-small-config"
EMBEDDED_DATASET = "python-functions"
EMBEDDED_SUMMARIES = "docstring-summaries"
PREPARED = frozenset({EMBEDDED_MODEL, EMBEDDED_CONFIG, EMBEDDED_DATASET, EMBEDDED_SUMMARIES})
PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"
SUMMARY_PROMPT = ("[SUMMARIZE] {article}", " [/SUMMARIZE]\n")
SAMPLE_ARTICLE = (
    "The file is opened when the first line is written, not before. Lines are collected in memory until there are a "
    "hundred of them, and are then written together, because a write for every line would be slow on a network drive. "
    "Closing the object writes what is left. An object that is not closed loses the lines that it still holds."
)
HELD_OUT_ROWS = 256

Tokens = dict[str, list[int]]


def embedded_folder(name: str) -> str:
    """Returns the folder of an embedded model or data set, in `MOREH_AP_CACHE` or `~/.cache/moreh_ap`.

    Raises:
        SystemExit: It has not been prepared; the message says how.
    """
    cache = Path(os.environ.get("MOREH_AP_CACHE") or "~/.cache/moreh_ap").expanduser()
    if not (cache / name).is_dir():
        raise SystemExit(f"{cache / name} does not exist; prepare it with: python scripts/prepare_tutorial.py")
    return str(cache / name)


def load_rows(name_or_path: str, columns: tuple[str, ...] = ()) -> DatasetDict:
    """Returns a data set with the parts `train` and `test`.

    Args:
        name_or_path: A folder written by `save_to_disk`, or NAME or NAME:CONFIGURATION on the Hugging Face hub. Where
            there is no `test` part, `HELD_OUT_ROWS` rows of `train` (at most a tenth) become one, always the same.
        columns: What a row must have.

    Raises:
        SystemExit: A column is missing.
    """
    if Path(name_or_path).is_dir():
        rows = load_from_disk(name_or_path)
    else:
        rows = load_dataset(*name_or_path.split(":", 1))
    if "test" not in rows:
        held_out = max(1, min(HELD_OUT_ROWS, len(rows["train"]) // 10))
        rows = rows["train"].train_test_split(test_size=held_out, seed=0)
    found = rows["train"].column_names
    if missing := [name for name in columns if name not in found]:
        raise SystemExit(f"{name_or_path} has the columns {', '.join(found)}; {' and '.join(missing)} is missing")
    return rows


def first_rows(rows: Dataset, count: int) -> Dataset:
    """Returns the first `count` rows, or all if there are fewer."""
    return rows.select(range(min(count, len(rows))))


def set_pad_token(tokenizer: Any) -> None:
    """Gives `tokenizer` a pad token that is not the end of a text, where its vocabulary has one to spare.

    A mask that is made by comparing tokens with the pad token would otherwise hide the end, and a model that never
    sees an end does not learn to stop. Llama 2 has `<unk>`, which no text contains; a tokenizer without such a token
    pads with the end.
    """
    if tokenizer.pad_token in (None, tokenizer.eos_token):
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token


def instruction_text(row: dict[str, str], end: str) -> str:
    """Returns prompt, answer and end of a row with `instruction`, `output` and perhaps `input`."""
    instruction = row["instruction"] + (f"\n{row['input']}" if row.get("input") else "")
    return PROMPT.format(instruction=instruction) + row["output"] + end


def summary_prompt(article: str) -> str:
    """Returns what a summary follows."""
    before, after = SUMMARY_PROMPT
    return before.format(article=article) + after


def tokenize(rows: DatasetDict, tokenizer: Any, block_size: int) -> DatasetDict:
    """Returns rows of instructions as `input_ids` and `attention_mask`, each cut or padded to `block_size` tokens."""

    def preprocess(row: dict[str, str]) -> Tokens:
        text = instruction_text(row, tokenizer.eos_token)
        encoded = tokenizer(text, truncation=True, max_length=block_size, padding="max_length")
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}

    return _map(rows, preprocess)


def tokenize_summaries(rows: DatasetDict, tokenizer: Any, block_size: int) -> DatasetDict:
    """Returns rows of `article` and `highlights` as `input_ids` and `attention_mask` of `block_size` tokens each.

    Where both are too long together, the article loses its end: without the highlights there is nothing to learn.
    """

    def preprocess(row: dict[str, str]) -> Tokens:
        before, after = SUMMARY_PROMPT
        tail = after + row["highlights"] + tokenizer.eos_token
        tail_ids = tokenizer(tail, add_special_tokens=False)["input_ids"][:block_size]
        head_ids = tokenizer(before.format(article=row["article"]))["input_ids"][: block_size - len(tail_ids)]
        ids = head_ids + tail_ids
        pads = block_size - len(ids)
        return {"input_ids": ids + [tokenizer.pad_token_id] * pads, "attention_mask": [1] * len(ids) + [0] * pads}

    return _map(rows, preprocess)


def tokenize_and_group(rows: Dataset, tokenizer: Any, block_size: int) -> Dataset:
    """Returns the texts of `rows`, one after another with an end between, as blocks of `block_size` tokens.

    A row has `text`, or `instruction` and `output`. No block has pads; what does not fill the last one is left out.
    Every block has `input_ids` and, equal to them, `labels`.
    """
    plain_text = "text" in rows.column_names

    def group(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        one_row = [dict(zip(batch, values)) for values in zip(*batch.values())]
        end = tokenizer.eos_token
        texts = [row["text"] + end if plain_text else instruction_text(row, end) for row in one_row]
        ids = [token for one in tokenizer(texts)["input_ids"] for token in one]
        blocks = [ids[start : start + block_size] for start in range(0, len(ids) - block_size + 1, block_size)]
        return {"input_ids": blocks, "labels": blocks}

    return rows.map(group, batched=True, batch_size=len(rows), remove_columns=rows.column_names, desc="Grouping")


def _map(rows: DatasetDict, preprocess: Callable[[dict[str, str]], Tokens]) -> DatasetDict:
    return rows.map(preprocess, remove_columns=rows["train"].column_names, desc="Tokenizing")
