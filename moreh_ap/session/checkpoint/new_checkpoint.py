"""A checkpoint that is being written: how it replaces the one before it in one step, and which earlier ones stay.

Decides in which order files are written, renamed and removed. Must not know models, optimizers or workers: it is given
names of tensors and the boxes that each process wrote.

[Note: one step]
Data files of a save have names of their own, so they never touch an earlier one. When all of them are on the disk,
`checkpoint.json`, which names them, is replaced by renaming: before that the last checkpoint is the earlier one, after
it the new one, even if the save is interrupted. The description of the earlier one has a second name by then, so that
it stays a checkpoint of the folder.

[Note: what is removed]
Files that no description names are those of interrupted saves, or of checkpoints that are no longer kept. A save
removes them before it writes, so that the folder never has more than `keep` checkpoints (two, if that is one), and
again at its end. Values of this process that it has not read yet keep their files.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from moreh_ap.errors import ExactnessError, LoadError
from moreh_ap.parallelizer.state.checkpoint_files import WrittenFile, problem_with
from moreh_ap.session.checkpoint.checkpoint_folder import (
    DESCRIPTION,
    VERSION,
    Checkpoint,
    descriptions,
    digest_of,
    earlier_name,
    files_in_use,
)
from moreh_ap.session.checkpoint.checkpoint_values import dtype_name
from moreh_ap.session.checkpoint.folder_lock import LOCK_WAITS_S, FolderLock
from moreh_ap.version import __version__

_OURS = re.compile(
    r"[0-9a-f]{8}-((controller|worker\d+)\.safetensors(~|\.written~?)?|witness)|checkpoint\.json\.[0-9a-f]{8}"
)
_KNOWN: defaultdict[str, set[str]] = defaultdict(set)
"""The checkpoints of a folder that this process has saved, or found when it loaded, by their ids."""


def seen(folder: str) -> None:
    """Notes that this process has loaded from a folder, whose checkpoints it may replace without a warning."""
    found = [_opened(path) for path in descriptions(folder)]
    _KNOWN[folder].update(checkpoint.id for checkpoint in found if checkpoint is not None)


class NewCheckpoint:
    """A checkpoint that is being written. See [Note: one step].

    Args:
        folder: The folder; created if it does not exist.
        keep: How many checkpoints the folder has afterwards, if it had as many.
        waits_s: How long to wait for another process that saves into the folder.

    Raises:
        OSError: The folder cannot be made, or another process has been saving into it for `waits_s`.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int, waits_s: float = LOCK_WAITS_S) -> None:
        self._folder, self._keep = os.path.abspath(folder), keep
        self._id = uuid.uuid4().hex[:8]
        os.makedirs(self._folder, exist_ok=True)
        self._lock = FolderLock(self._folder, waits_s)
        try:
            self._begin()
        except BaseException:
            self._lock.release()
            raise

    def _begin(self) -> None:
        """Removes files that are not needed, and warns if another process has saved here."""
        found = {path: _opened(path) for path in descriptions(self._folder)}
        whole = {
            path: checkpoint
            for path, checkpoint in found.items()
            if checkpoint is not None and not _has_wrong_sizes(checkpoint)
        }
        self._last = last = next(iter(whole.values()), None)
        self._last_number = last.number if os.path.join(self._folder, DESCRIPTION) in whole and last else None
        if last is not None and _KNOWN[self._folder] and last.id not in _KNOWN[self._folder]:
            warnings.warn(
                f"Another run saves into {self._folder} too: its checkpoint, {last.saved_at}, is not of this run. "
                "Give every run a folder of its own.",
                stacklevel=4,
            )
        self._number = 1 + max((checkpoint.number for checkpoint in found.values() if checkpoint), default=0)
        # The last description is there twice if a save was killed between its two renamings.
        kept = list({checkpoint.id: path for path, checkpoint in reversed(whole.items())}.values())[::-1]
        self._clean(kept[: max(1, self._keep - 1)], set(found))

    def _clean(self, kept: list[str], known: set[str]) -> None:
        """Removes descriptions among `known` that are not kept, and files that no description names."""
        last = os.path.join(self._folder, DESCRIPTION)
        self._remove(os.path.basename(path) for path in known - {*kept, last})
        needed = files_in_use(self._folder)
        for path in descriptions(self._folder):
            checkpoint = _opened(path)
            if checkpoint is not None:
                needed.update(checkpoint.content["files"])
        self._remove(
            name
            for name in os.listdir(self._folder)
            if _OURS.fullmatch(name) and name not in needed and self._id not in name
        )

    def give_up(self) -> None:
        """Removes the files written so far, and lets others save."""
        self._remove(name for name in os.listdir(self._folder) if self._id in name)
        self._lock.release()

    def path(self, writer: str) -> str:
        """Returns the prefix of the file paths of `writer` ("controller", "worker")."""
        return os.path.join(self._folder, f"{self._id}-{writer}")

    def remove_workers_files(self) -> None:
        """Removes what workers have written so far."""
        prefix = os.path.basename(self.path("worker"))
        self._remove(name for name in os.listdir(self._folder) if name.startswith(prefix))

    def what_stays(self) -> str:
        """Returns what is in the folder if this save fails, as a sentence."""
        if self._last is None:
            return f"{self._folder} has no checkpoint yet."
        return f"{self._folder} keeps the checkpoint of before, {self._last.saved_at}."

    def make_witness(self) -> str:
        """Makes an empty file in the folder, which goes when the save ends, and returns its path.

        A host that sees it shares the folder; another folder may have the same name elsewhere.
        """
        path = self.path("witness")
        with open(path, "xb"):
            return path

    def write(self, write_files: Callable[[], Sequence[WrittenFile]], tensors: dict[str, Tensor], content: Any) -> None:
        """Writes data files and makes them the checkpoint. If anything fails, the folder stays what it was.

        Args:
            write_files: Writes the data files and returns what they hold.
            tensors: All tensors by name, for their shapes and dtypes.
            content: Other content of `checkpoint.json`.

        Raises:
            OSError: A file could not be written.
        """
        try:
            self._write(write_files, tensors, content)
        finally:
            self._lock.release()

    def _write(
        self, write_files: Callable[[], Sequence[WrittenFile]], tensors: dict[str, Tensor], content: Any
    ) -> None:
        try:
            files = write_files()
            for file in files:
                problem = file.failure or problem_with(file.path, file.num_bytes, None)
                if problem:
                    stays = " The checkpoint before it is whole, and stays." if descriptions(self._folder) else ""
                    raise OSError(f"{file.path}: {problem}.{stays}")
            self._commit(self._describe(files, tensors) | content)
        except BaseException:  # a full disk, a lost worker, Ctrl-C: no files of this save may stay
            if not self._is_current():
                self._remove(name for name in os.listdir(self._folder) if self._id in name)
            raise
        _KNOWN[self._folder].add(self._id)
        self._remove([os.path.basename(self.path("witness"))])
        known = descriptions(self._folder)
        self._clean(known[: self._keep], set(known))

    def _describe(self, files: Sequence[WrittenFile], tensors: dict[str, Tensor]) -> dict[str, Any]:
        pieces: dict[str, list[dict[str, Any]]] = {name: [] for name in tensors}
        for file in files:
            for box in file.boxes:
                place = {"file": os.path.basename(file.path), "key": box.key, "start": box.start, "size": box.size}
                pieces[box.name].append(place)
        for name, boxes in pieces.items():
            written = sum(prod(box["size"]) for box in boxes)
            if written != tensors[name].numel():
                raise ExactnessError(
                    f"{written} elements of {name} were written, it has {tensors[name].numel()}",
                    "every element written once",
                )
        return {
            "format": "moreh_ap checkpoint",
            "version": VERSION,
            "id": self._id,
            "number": self._number,
            "saved": {
                "at": time.strftime("%Y-%m-%d %H:%M:%S %z"),
                "by": f"process {os.getpid()} on {socket.gethostname()}",
            },
            "versions": {
                "moreh_ap": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "files": {os.path.basename(file.path): {"bytes": file.num_bytes, "sha256": file.sha256} for file in files},
            "tensors": {
                name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "pieces": pieces[name]}
                for name, tensor in tensors.items()
            },
        }

    def _commit(self, content: dict[str, Any]) -> None:
        content = json.loads(json.dumps(content, allow_nan=False))
        if self._keep > 1 and self._last_number is not None:
            with open(os.path.join(self._folder, DESCRIPTION), "rb") as file:
                self._put(earlier_name(self._last_number), file.read())
        self._put(DESCRIPTION, json.dumps(content | {"sha256": digest_of(content)}, indent=1).encode())

    def _put(self, name: str, data: bytes) -> None:
        """Makes `data` the content of a file in one step."""
        new = os.path.join(self._folder, f"{DESCRIPTION}.{self._id}")
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self._folder)  # the names of the data files are on the disk before the one that names them
        os.replace(new, os.path.join(self._folder, name))
        _sync_folder(self._folder)

    def _is_current(self) -> bool:
        """Returns whether `checkpoint.json` names the files of this save already."""
        with (
            contextlib.suppress(FileNotFoundError),
            open(os.path.join(self._folder, DESCRIPTION), encoding="utf-8", errors="replace") as file,
        ):
            return self._id in file.read()
        return False

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(self._folder, name))


def _opened(path: str) -> Checkpoint | None:
    """Returns the checkpoint that a file describes; None if it is damaged, or of a later version."""
    try:
        opened = Checkpoint.open(path, verify=False)
    except LoadError:
        return None
    return opened if isinstance(opened, Checkpoint) else None


def _has_wrong_sizes(checkpoint: Checkpoint) -> bool:
    return any(problem_with(path, num_bytes, None) for path, num_bytes, _ in checkpoint.files(verify=False))


def _sync_folder(folder: str) -> None:
    """Flushes the names in a folder to the disk. Source: fsync(2)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
