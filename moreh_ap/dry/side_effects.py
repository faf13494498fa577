"""What a script does to the world before its first call of a model: files, trackers, questions.

Decides what of it a dry run leaves out, and what it tells. Must not know the script's model.
"""

from __future__ import annotations

import builtins
import contextlib
import getpass
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from moreh_ap.local.cache_files import cache_folder
from moreh_ap.patching import Patches, PatchGroup

_TRACKERS = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables by which trackers are turned off, as their documentation names them."""

_OURS = ("MOREH_TRACE", "MOREH_REPORT", "MOREH_CHECK", "MOREH_STRICT")
"""Variables that ask for what a dry run has not: steps."""

_EVENT_WRITERS = ("tensorboard.summary.writer.event_file_writer", "tensorboardX.event_file_writer")
"""Modules whose `EventFileWriter` writes the files of TensorBoard."""

_NOT_SAID = ("/dev", "/proc", "/sys")
_CACHES = {"__pycache__", ".cache", ".matplotlib", ".triton", ".locks"}


class Asked(BaseException):
    """The script asks a question; no `except Exception` of its own holds it back."""


class SideEffects:
    """What was noticed.

    Attributes:
        written: Files and folders that the script wrote, made, moved or removed, in order.
        left_out: What was not done, and how often.
    """

    def __init__(self) -> None:
        self.written: dict[str, None] = {}
        self.left_out: dict[str, int] = {}
        self._is_noting = False
        self._skipped = tuple(map(str, (*_NOT_SAID, cache_folder(), sys.prefix)))

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, trackers and saves are left out, questions end the script, and written files are noted."""
        for name in _OURS:
            os.environ.pop(name, None)
        os.environ.update(_TRACKERS)
        patches = Patches()
        self._replace(patches.group("A dry run saves nothing and asks nothing."))
        sys.addaudithook(self._note)  # cannot be removed: it stops by itself
        self._is_noting = True
        try:
            yield
        finally:
            self._is_noting = False
            patches.undo()

    def sentences(self) -> Iterator[str]:
        """Yields what a user has to know."""
        if self.written:
            names = list(self.written)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"Before its first call the script changed files: {', '.join(names[:5])}{more}."
        for what, count in self.left_out.items():
            yield f"Left out: {what}{f', {count} times' if count > 1 else ''}."

    def note_left_out(self, what: str) -> None:
        """Records that something was not done."""
        self.left_out[what] = self.left_out.get(what, 0) + 1

    def _replace(self, group: PatchGroup) -> None:
        left_out = self.note_left_out

        def save(*args: Any, **kwargs: Any) -> None:
            """Saves nothing."""
            left_out("torch.save")

        def save_file(*args: Any, **kwargs: Any) -> None:
            """Saves nothing."""
            left_out("safetensors.torch.save_file")

        def ask(*args: Any, **kwargs: Any) -> str:
            """Ends the dry run."""
            raise Asked

        class EventFileWriter:
            """Takes what the writer of TensorBoard's files takes, and writes nothing."""

            def __init__(self, logdir: str, *args: Any, **kwargs: Any) -> None:
                self._logdir = logdir
                left_out("TensorBoard")

            def get_logdir(self) -> str:
                return self._logdir

            def __getattr__(self, name: str) -> Any:
                return lambda *args, **kwargs: None

        group.replace(torch, "save", save)
        group.replace(builtins, "input", ask)
        group.replace(getpass, "getpass", ask)
        group.when_imported("safetensors.torch", lambda module: _replace(group, module, "save_file", save_file))
        for name in _EVENT_WRITERS:
            group.when_imported(name, lambda module: _replace(group, module, "EventFileWriter", EventFileWriter))

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_noting or not arguments:
            return
        if event == "open":
            _, mode, flags = arguments
            changes = bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool(flags & _WRITES)
        else:
            changes = event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree", "os.truncate")
        path = arguments[0]
        if not changes or not isinstance(path, (str, bytes, os.PathLike)):
            return
        name = os.fsdecode(path)
        whole = Path(os.path.abspath(name))
        is_temporary = whole.is_relative_to(tempfile.gettempdir()) and not whole.is_relative_to(Path.cwd())
        if is_temporary or str(whole).startswith(self._skipped) or _CACHES & set(whole.parts):
            return
        self.written.setdefault(name)


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _replace(group: PatchGroup, module: ModuleType, name: str, new: Any) -> None:
    group.replace(module, name, new)
