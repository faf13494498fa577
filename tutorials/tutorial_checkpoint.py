"""Checkpoints of a training run with `torch.save`: a folder for each, and `state.json`, which names the last.

Decides in which order files are written, so that an interruption leaves the last checkpoint whole. Of the objects that
it saves it knows nothing but that they have state dicts.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

STATE_FILE = "state.json"


def save_checkpoint(folder: Path, state: dict[str, Any], **objects: Any) -> None:
    """Saves the state dicts of `objects` and then, in one step, `state` with the place of them; removes older ones.

    Args:
        folder: That of the experiment.
        state: What JSON can say, with `global_step`.
        **objects: For example `model` and `optimizer`, each saved as `NAME.pt`.
    """
    name = f"step-{state['global_step']}"
    new = folder / name
    shutil.rmtree(new, ignore_errors=True)  # of an interrupted run
    new.mkdir()
    for key, one in objects.items():
        torch.save(one.state_dict(), new / f"{key}.pt")
    draft = folder / f"{STATE_FILE}.new"
    draft.write_text(json.dumps({**state, "checkpoint": name}) + "\n")
    os.replace(draft, folder / STATE_FILE)
    for old in folder.glob("step-*"):
        if old != new:
            shutil.rmtree(old)


def load_checkpoint(folder: Path, **objects: Any) -> dict[str, Any]:
    """Loads the last checkpoint in `folder` into `objects`, and returns its state."""
    state = json.loads((folder / STATE_FILE).read_text())
    checkpoint = folder / state.pop("checkpoint")
    for key, one in objects.items():
        one.load_state_dict(torch.load(checkpoint / f"{key}.pt", map_location="cpu"))
    return state
