"""What the scripts of this folder share: flags, rows and tokens, evaluation, progress, timers, checkpoints.

All of it runs in the script's process and is written for one device. Suffixes of tensors: B rows, T tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from torch.utils.data import DataLoader

PREPARED = ("smollm2-135m-instruct", "gpt2-small-config", "python-functions", "docstring-summaries")
PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"
SUMMARY_PROMPT = "[SUMMARIZE] {article} [/SUMMARIZE]\n"
SAMPLE_ARTICLE = (
    "The file is opened when the first line is written, not before. Lines are collected in memory until there are a "
    "hundred of them, and are then written together, because a write for every line would be slow on a network drive. "
    "Closing the object writes what is left. An object that is not closed loses the lines that it still holds."
)
HELD_OUT_ROWS = 256
MINIMUM = {"batch_size": 1, "block_size": 1, "epoch": 1, "log_interval": 1, "ckpt_freq": 1, "max_new_tokens": 1,
           "max_steps": 0, "eval_rows": 0, "sample_tokens": 0}  # fmt: skip

Tokens = dict[str, list[int]]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the description as written, and the default of each flag."""


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the arguments, with the folder of what scripts/prepare_tutorial.py prepared in place of its name.

    Ends the program if a number is below its minimum, or such a folder is missing.
    """
    args = parser.parse_args()
    for name, value in vars(args).items():
        if name in MINIMUM and value < MINIMUM[name]:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least {MINIMUM[name]}")
        if value in PREPARED:
            folder = Path(os.environ.get("MOREH_AP_CACHE") or "~/.cache/moreh_ap").expanduser() / value
            setattr(args, name, must_exist(folder, "prepare it with: python scripts/prepare_tutorial.py"))
    return args


def must_exist(path: str | Path, remedy: str) -> str:
    """Returns `path`; if it does not exist, ends the program and says the remedy."""
    if not Path(path).exists():
        raise SystemExit(f"{path} does not exist; {remedy}")
    return str(path)


def load_rows(name_or_path: str, columns: tuple[str, ...] = (), eval_rows: int | None = None) -> DatasetDict:
    """Returns the parts `train` and `test` of a folder written by `save_to_disk`, or of NAME or NAME:CONFIGURATION.

    A data set without `test` gives up rows of `train` for it, always the same ones: `HELD_OUT_ROWS`, at most a tenth.
    With `eval_rows`, only so many rows of `test` are kept. Ends the program if the rows lack one of `columns`.
    """
    is_folder = Path(name_or_path).is_dir()
    rows = load_from_disk(name_or_path) if is_folder else load_dataset(*name_or_path.split(":", 1))
    if "test" not in rows:
        held_out = max(1, min(HELD_OUT_ROWS, len(rows["train"]) // 10))
        rows = rows["train"].train_test_split(test_size=held_out, seed=0)
    found = rows["train"].column_names
    if missing := [name for name in columns if name not in found]:
        raise SystemExit(f"{name_or_path} has the columns {', '.join(found)}; {' and '.join(missing)} is missing")
    rows["test"] = rows["test"].select(range(len(rows["test"]))[:eval_rows])
    return rows


def set_pad_token(tokenizer: Any) -> None:
    """Gives `tokenizer` a padding token other than the end token if it has `<unk>` to spare, which no text contains.

    A mask made by comparing tokens with the padding token would hide ends too, and the model would not learn to stop.
    """
    if tokenizer.pad_token in (None, tokenizer.eos_token):
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token


def instruction_text(row: dict[str, str]) -> str:
    """Returns prompt and answer of a row with `instruction`, `output` and perhaps `input`."""
    more = f"\n{row['input']}" if row.get("input") else ""
    return PROMPT.format(instruction=row["instruction"] + more) + row["output"]


def instruction_tokens(row: dict[str, str], tokenizer: Any, block_size: int) -> Tokens:
    """Returns `input_ids` and `attention_mask` of a row of instructions, cut or padded to `block_size` tokens."""
    text = instruction_text(row) + tokenizer.eos_token
    tokens = tokenizer(text, truncation=True, max_length=block_size, padding="max_length")
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


def summary_tokens(row: dict[str, str], tokenizer: Any, block_size: int) -> Tokens:
    """Returns the same of a row of `article` and `highlights`; what does not fit is taken from the article's end."""
    head, tail = (SUMMARY_PROMPT + row["highlights"] + tokenizer.eos_token).split("{article}", 1)
    tail_ids = tokenizer(tail, add_special_tokens=False)["input_ids"][:block_size]
    ids = tokenizer(head + row["article"])["input_ids"][: block_size - len(tail_ids)] + tail_ids
    pads = block_size - len(ids)
    return {"input_ids": ids + [tokenizer.pad_token_id] * pads, "attention_mask": [1] * len(ids) + [0] * pads}


def tokenize(rows: DatasetDict, form: Callable[..., Tokens], tokenizer: Any, block_size: int) -> DatasetDict:
    """Returns the rows as `form` makes them of each, as tensors."""
    settings = {"tokenizer": tokenizer, "block_size": block_size}
    columns = rows["train"].column_names
    return rows.map(form, fn_kwargs=settings, remove_columns=columns, desc="Tokenizing").with_format("torch")


def tokenize_and_group(rows: Dataset, tokenizer: Any, block_size: int) -> Dataset:
    """Returns the texts of rows, an end token behind each, as full blocks of `input_ids`, and equal `labels`.

    A row has `text`, or `instruction` and `output`. Tokens that do not fill the last block are left out.
    """

    def group(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = batch.get("text") or [instruction_text(dict(zip(batch, row))) for row in zip(*batch.values())]
        ids = [token for one in tokenizer([text + tokenizer.eos_token for text in texts])["input_ids"] for token in one]
        blocks = [ids[start : start + block_size] for start in range(0, len(ids) - block_size + 1, block_size)]
        return {"input_ids": blocks, "labels": blocks}

    return rows.map(group, batched=True, batch_size=len(rows), remove_columns=rows.column_names, desc="Grouping")


@torch.no_grad()
def held_out_loss(model: Any, rows: Any, batch_size: int, device: str) -> float | None:
    """Prints and returns the mean loss per token of all rows; None without rows. The model is in eval mode then."""
    model.eval()
    losses, counts = [], []
    for batch in DataLoader(rows, batch_size=batch_size):
        input_ids_BT, mask_BT = batch["input_ids"], batch["attention_mask"]
        labels_BT = input_ids_BT.masked_fill(mask_BT == 0, -100)
        inputs = {"input_ids": input_ids_BT, "attention_mask": mask_BT, "labels": labels_BT}
        losses.append(model(**{name: tensor.to(device) for name, tensor in inputs.items()}, use_cache=False)[0])
        counts.append((labels_BT[:, 1:] != -100).sum().item())
    if not losses:
        return None
    mean = sum(loss.item() * count for loss, count in zip(losses, counts)) / sum(counts)
    print(f"held-out loss: {mean:.4f}", flush=True)
    return mean


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    """Returns what the model writes after `prompt`, the most likely token each time; nothing for 0 tokens."""
    if max_new_tokens == 0:
        return ""
    model.eval()
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    tokens = model.generate(**inputs, **settings)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


class Progress:
    """Keeps the loss of every step, and prints a line every `args.log_interval` steps and after the last.

    `num_batches` are those of one pass over the data; if there is none, the program ends.
    """

    def __init__(self, num_batches: int, args: argparse.Namespace) -> None:
        if num_batches < 1:
            raise SystemExit(f"the training rows do not fill one batch of {args.batch_size}; lower --batch-size")
        self.num_epochs, self.interval = args.epoch, args.log_interval
        self.num_steps = min(args.max_steps or args.epoch * num_batches, args.epoch * num_batches)
        self._losses: list[torch.Tensor] = []
        self._tokens, self._since_s = 0, time.perf_counter()
        print(f"training: {self.num_steps} steps of {args.batch_size} sequences", flush=True)

    @property
    def done(self) -> bool:
        """Whether all steps have been taken."""
        return len(self._losses) >= self.num_steps

    def step(self, epoch: int, loss: torch.Tensor, num_tokens: int) -> None:
        """Counts a step of `num_tokens` tokens, padding included. `epoch` starts at 0, `loss` has one element."""
        self._losses.append(loss.detach())  # reading it here would wait for the step
        self._tokens += num_tokens
        step = len(self._losses)
        if step % self.interval == 0 or self.done:
            value, now_s = loss.item(), time.perf_counter()
            speed = f"{self._tokens / (now_s - self._since_s):,.0f} tokens/s"
            place = f"epoch {epoch + 1}/{self.num_epochs}, step {step}/{self.num_steps}"
            print(f"[{place}] loss {value:.4f}, {speed}", flush=True)
            self._tokens, self._since_s = 0, now_s

    def save(self, folder: str, before: float | None, after: float | None) -> None:
        """Writes `losses.json`: the loss of every step, and the held-out loss before and after, if there is one."""
        content = {"losses": [loss.item() for loss in self._losses], "held_out_before": before, "held_out_after": after}
        path = Path(folder) / "losses.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        if before is not None:
            print(f"held-out loss before: {before:.4f}, after: {after:.4f}")
        print(f"model and losses.json saved to {folder}")


@contextlib.contextmanager
def timed(durations_ms: list[float]) -> Iterator[None]:
    """Appends how long its body takes, with a wait for the devices at both ends; nothing if the body fails."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start_s = time.perf_counter()
    yield
    wait()
    durations_ms.append(1000 * (time.perf_counter() - start_s))


def memory_stats() -> dict[str, float]:
    """Returns total, allocated, reserved and peak memory of the device in GiB; nothing without a device."""
    if not torch.cuda.is_available():
        return {}
    sizes = {"total": torch.cuda.get_device_properties(0).total_memory, "allocated": torch.cuda.memory_allocated()}
    sizes |= {"reserved": torch.cuda.memory_reserved(), "peak_allocated": torch.cuda.max_memory_allocated()}
    return {f"memory/{name}_gib": size / 2**30 for name, size in sizes.items()}


def start_wandb(args: argparse.Namespace, folder: Path, resumed: bool, dataloader: DataLoader) -> Any:
    """Returns the run of Weights & Biases with the experiment's name; without `--wandb`, one that logs nothing.

    The run is a new one or, if `resumed`, the one that has this name.
    """
    if not args.wandb:
        return SimpleNamespace(log=lambda info, step: None, finish=lambda: None)
    try:
        import wandb
    except ModuleNotFoundError:
        raise SystemExit("--wandb needs the package wandb, which is not installed: pip install wandb") from None
    # --8<-- [start:wandb]
    folder.mkdir(parents=True, exist_ok=True)
    name, resume = args.experiment_name, "must" if resumed else None
    config = {"args": vars(args), "training_data_size": len(dataloader.dataset), "num_batches": len(dataloader)}
    return wandb.init(project="moreh-ap-tutorials", dir=folder, name=name, id=name, resume=resume, save_code=True,
                      config=config)  # fmt: skip
    # --8<-- [end:wandb]


def save_checkpoint(folder: Path, state: dict[str, Any], **objects: Any) -> None:
    """Saves the state dict of each object as `step-N/NAME.pt`, N being `state["global_step"]`, and `state.json`.

    `state.json` is replaced in one operation, and older steps are removed after it, so that an interrupted run keeps
    its last checkpoint.
    """
    # --8<-- [start:checkpoint]
    new = folder / f"step-{state['global_step']}"
    shutil.rmtree(new, ignore_errors=True)  # of an interrupted run
    new.mkdir(parents=True)
    for name, one in objects.items():
        torch.save(one.state_dict(), new / f"{name}.pt")
    (folder / "state.json.new").write_text(json.dumps(state) + "\n")
    os.replace(folder / "state.json.new", folder / "state.json")
    for old in set(folder.glob("step-*")) - {new}:
        shutil.rmtree(old)
    # --8<-- [end:checkpoint]


def load_checkpoint(folder: Path, **objects: Any) -> dict[str, Any]:
    """Loads the last checkpoint in `folder` into `objects`, and returns its state; without one, an empty dict."""
    if not (folder / "state.json").exists():
        return {}
    state = json.loads((folder / "state.json").read_text())
    for name, one in objects.items():
        saved = torch.load(folder / f"step-{state['global_step']}" / f"{name}.pt", map_location="cpu")
        one.load_state_dict(saved)
    return state
