"""What the tutorial scripts share: tokens of a row, the split, masks, reports, checkpoints, timers."""

from __future__ import annotations

import importlib
import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import tutorial_helpers
from tutorial_helpers import Progress


class Letters:
    """A tokenizer with one token a letter, in the forms that the tutorials use."""

    pad_token = eos_token = "$"
    unk_token = "?"
    pad_token_id = 0

    def __call__(
        self, text: str | list[str], max_length: int | None = None, padding: str = "", **settings: bool
    ) -> dict[str, list]:
        if isinstance(text, list):
            return {"input_ids": [[ord(letter) for letter in one] for one in text]}
        ids = [ord(letter) for letter in text][:max_length]
        pads = max_length - len(ids) if padding == "max_length" else 0
        return {"input_ids": ids + [0] * pads, "attention_mask": [1] * len(ids) + [0] * pads}


def letters(ids: list[int]) -> str:
    return "".join(chr(token) for token in ids if token)


def rows(count: int):
    from datasets import Dataset, DatasetDict

    columns = {"output": [f"def f{i}(): pass" for i in range(count)], "instruction": [f"f{i}" for i in range(count)]}
    return DatasetDict({"train": Dataset.from_dict(columns)})


def test_tokens_are_prompt_answer_and_end_padded_to_the_block() -> None:
    tokens = tutorial_helpers.tokenize(rows(1), tutorial_helpers.instruction_tokens, Letters(), block_size=80)["train"]
    text = tutorial_helpers.PROMPT.format(instruction="f0") + "def f0(): pass$"
    assert tokens.column_names == ["input_ids", "attention_mask"]
    assert tokens[0]["input_ids"].tolist() == [ord(letter) for letter in text] + [0] * (80 - len(text))
    assert tokens[0]["attention_mask"].sum() == len(text)
    row = {"instruction": "f0", "output": "def f0(): pass", "input": "of 0"}
    assert len(tutorial_helpers.instruction_tokens(row, Letters(), block_size=7)["input_ids"]) == 7
    prompt = tutorial_helpers.PROMPT.format(instruction="f0\nof 0")
    assert tutorial_helpers.instruction_text(row) == prompt + row["output"]


def test_a_data_set_without_a_held_out_part_gets_the_same_one_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tutorial_helpers, "load_dataset", lambda name: rows(50))
    first, second = tutorial_helpers.load_rows("name/on-the-hub"), tutorial_helpers.load_rows("name/on-the-hub")
    assert (len(first["train"]), len(first["test"])) == (45, 5)
    assert first["test"]["instruction"] == second["test"]["instruction"]
    assert set(first["test"]["instruction"]).isdisjoint(first["train"]["instruction"])


def test_a_missing_column_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tutorial_helpers, "load_dataset", lambda name: rows(50))
    with pytest.raises(SystemExit, match="a/name has the columns output, instruction; article is missing"):
        tutorial_helpers.load_rows("a/name", columns=("instruction", "article"))


def test_a_configuration_of_a_data_set_follows_a_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(tutorial_helpers, "load_dataset", lambda *names: asked.append(names) or rows(50))
    tutorial_helpers.load_rows("cnn_dailymail:3.0.0")
    assert asked == [("cnn_dailymail", "3.0.0")]


def test_an_article_that_is_too_long_loses_its_end_and_keeps_its_highlights() -> None:
    from datasets import Dataset, DatasetDict

    columns = {"article": ["apples " * 30, "pears"], "highlights": ["Fruit.", "Fruit."], "id": ["1", "2"]}
    articles = DatasetDict({"train": Dataset.from_dict(columns)})
    tokens = tutorial_helpers.tokenize(articles, tutorial_helpers.summary_tokens, Letters(), 60)["train"]
    tail = " [/SUMMARIZE]\nFruit.$"
    assert letters(tokens[0]["input_ids"]) == ("[SUMMARIZE] " + "apples " * 30)[: 60 - len(tail)] + tail
    assert letters(tokens[1]["input_ids"]) == "[SUMMARIZE] pears" + tail
    for row in tokens:
        assert len(row["input_ids"]) == 60
        assert row["attention_mask"].tolist() == [int(token != 0) for token in row["input_ids"]]


def test_texts_follow_each_other_in_full_blocks() -> None:
    from datasets import Dataset

    instructions = Dataset.from_dict({"instruction": ["a", "b"], "output": ["x" * 20, "y" * 20]})
    blocks = tutorial_helpers.tokenize_and_group(instructions, Letters(), block_size=16)
    assert blocks.column_names == ["input_ids", "labels"]
    assert blocks["input_ids"][:] == blocks["labels"][:]
    text = "".join(tutorial_helpers.PROMPT.format(instruction=one) + 20 * two + "$" for one, two in ("ax", "by"))
    assert [letters(ids) for ids in blocks["input_ids"]] == [text[i : i + 16] for i in range(0, len(text) - 15, 16)]
    plain = tutorial_helpers.tokenize_and_group(Dataset.from_dict({"text": ["abc", "de"]}), Letters(), block_size=3)
    assert [letters(ids) for ids in plain["input_ids"]] == ["abc", "$de"]


def test_the_pad_token_is_not_the_end_where_there_is_another() -> None:
    tokenizer = Letters()
    tutorial_helpers.set_pad_token(tokenizer)
    assert tokenizer.pad_token == "?"
    tokenizer.pad_token, tokenizer.unk_token = None, None
    tutorial_helpers.set_pad_token(tokenizer)
    assert tokenizer.pad_token == "$"


@pytest.mark.parametrize("name", ["train_gpt", "train_mistral"])
def test_pads_are_masked_by_the_attention_mask_and_not_by_the_token(name: str) -> None:
    end = 2  # the end of a text is the pad token too
    input_ids = torch.tensor([[5, 6, end, end, end]])
    attention_mask = torch.tensor([[1, 1, 1, 0, 0]])
    labels = importlib.import_module(name).mask_pads(input_ids, attention_mask)
    assert labels.tolist() == [[5, 6, end, -100, -100]]
    assert input_ids.tolist() == [[5, 6, end, end, end]]


def test_masks_of_the_llamas_come_from_the_tokenizer() -> None:
    from train_llama2 import create_mask, mask_pads

    input_ids = torch.tensor([[5, 6, 2, 0, 0]])
    tokenizer = Namespace(pad_token_id=0, eos_token_id=2)
    assert create_mask(input_ids, tokenizer).tolist() == [[1, 1, 1, 0, 0]]
    assert mask_pads(input_ids, tokenizer).tolist() == [[5, 6, 2, -100, -100]]
    tokenizer.pad_token_id = None  # the end serves
    assert create_mask(input_ids, tokenizer).tolist() == [[1, 1, 0, 1, 1]]


# -- what a run shows and keeps ----------------------------------------------------------------------------------------


def arguments(**changes: object) -> Namespace:
    return Namespace(**{"epoch": 2, "max_steps": 0, "log_interval": 2, "batch_size": 4, "model": "a/toy", **changes})


def test_progress_prints_every_few_steps_and_the_last_and_keeps_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(num_batches=2, args=arguments(max_steps=3))
    for loss in (3.0, 2.0, 1.0):
        assert not progress.done
        progress.step(0, torch.tensor(loss), num_tokens=8)
    assert progress.done
    progress.save(str(tmp_path / "run"), before=4.0, after=0.5)
    out = capsys.readouterr().out
    assert re.findall(r"step (\d)/3\] loss ([\d.]+)", out) == [("2", "2.0000"), ("3", "1.0000")]
    assert "held-out loss before: 4.0000, after: 0.5000" in out
    content = json.loads((tmp_path / "run" / "losses.json").read_text())
    assert content == {"losses": [3.0, 2.0, 1.0], "held_out_before": 4.0, "held_out_after": 0.5}
    assert Progress(num_batches=2, args=arguments()).num_steps == 4
    with pytest.raises(SystemExit, match="do not fill one batch of 4"):
        Progress(num_batches=0, args=arguments())


def test_a_checkpoint_that_was_interrupted_leaves_the_last_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    tutorial_helpers.save_checkpoint(tmp_path, {"global_step": 1}, model=model)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    torch.nn.init.zeros_(model.weight)
    interrupted = Namespace(state_dict=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tutorial_helpers.save_checkpoint(tmp_path, {"global_step": 2}, model=model, optimizer=interrupted)
    assert tutorial_helpers.load_checkpoint(tmp_path, model=model) == {"global_step": 1}
    assert torch.equal(model.weight, saved["weight"])
    tutorial_helpers.save_checkpoint(tmp_path, {"global_step": 3}, model=model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "step-3"]


def test_a_new_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert tutorial_helpers.load_checkpoint(tmp_path / "new", model=torch.nn.Linear(2, 2)) == {}


def test_a_timer_appends_what_its_body_took_unless_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 5.0, 8.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    durations_ms: list[float] = []
    for _ in range(2):
        with tutorial_helpers.timed(durations_ms):
            pass
    assert durations_ms == [1000, 3000]
    with pytest.raises(ValueError, match="not counted"), tutorial_helpers.timed(durations_ms):
        raise ValueError("a phase that fails is not counted")
    assert durations_ms == [1000, 3000]


def test_without_held_out_rows_there_is_no_loss_and_without_tokens_no_answer() -> None:
    model = torch.nn.Linear(2, 2)
    assert tutorial_helpers.held_out_loss(model, [], 4, "cpu") is None
    assert tutorial_helpers.answer(model, None, "a prompt", max_new_tokens=0) == ""
