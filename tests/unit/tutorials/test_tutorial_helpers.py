"""The small files beside the tutorial scripts: tokens of a row, the split, the plot, and masked pads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import tutorial_data
from tutorial_plot import save_loss_plot


class Letters:
    """A tokenizer with one token a letter, in the form that `tokenize` uses."""

    eos_token = "$"

    def __call__(self, text: str, truncation: bool, max_length: int, padding: str) -> dict[str, list[int]]:
        ids = [ord(letter) for letter in text][:max_length]
        pads = max_length - len(ids)
        return {"input_ids": ids + [0] * pads, "attention_mask": [1] * len(ids) + [0] * pads}


def rows(count: int):
    from datasets import Dataset, DatasetDict

    columns = {"output": [f"def f{i}(): pass" for i in range(count)], "instruction": [f"f{i}" for i in range(count)]}
    return DatasetDict({"train": Dataset.from_dict(columns)})


def test_tokens_are_prompt_answer_and_end_padded_to_the_block() -> None:
    tokens = tutorial_data.tokenize(rows(1), Letters(), block_size=80)["train"]
    text = tutorial_data.PROMPT.format(instruction="f0") + "def f0(): pass$"
    assert tokens.column_names == ["input_ids", "attention_mask"]
    assert tokens[0]["input_ids"] == [ord(letter) for letter in text] + [0] * (80 - len(text))
    assert sum(tokens[0]["attention_mask"]) == len(text)
    assert len(tutorial_data.tokenize(rows(1), Letters(), block_size=7)["train"][0]["input_ids"]) == 7


def test_a_data_set_without_a_held_out_part_gets_the_same_one_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tutorial_data, "load_dataset", lambda name: rows(50))
    first, second = tutorial_data.load_rows("name/on-the-hub"), tutorial_data.load_rows("name/on-the-hub")
    assert (len(first["train"]), len(first["test"])) == (45, 5)
    assert first["test"]["instruction"] == second["test"]["instruction"]
    assert set(first["test"]["instruction"]).isdisjoint(first["train"]["instruction"])


def test_plot_is_a_png_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "loss.png"
    save_loss_plot(path, [2.0, 1.5, 1.2], (2.1, 1.3), "toy")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_pads_are_masked_by_the_attention_mask_and_not_by_the_token() -> None:
    from train_gpt import mask_pads

    end = 2  # the end of a text is the pad token too
    input_ids = torch.tensor([[5, 6, end, end, end]])
    attention_mask = torch.tensor([[1, 1, 1, 0, 0]])
    assert mask_pads(input_ids, attention_mask).tolist() == [[5, 6, end, -100, -100]]
    assert input_ids.tolist() == [[5, 6, end, end, end]]
