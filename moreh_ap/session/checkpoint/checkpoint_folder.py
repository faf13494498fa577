"""The folder of a training checkpoint: its files, how a new checkpoint replaces it atomically, how it is checked.

Decides the format. Must not know models, optimizers or workers: it is given names of tensors and the box that each
process wrote.

[Note: one step]
Data files of a save have names of their own, so they never touch an earlier one. When all of them are on the disk,
`checkpoint.json`, which names them, is replaced by renaming: before that the folder is the earlier checkpoint, after it
the new one, even if the save is interrupted. Files that no `checkpoint.json` names are removed by the next save that
succeeds, but for those that values of this process, not read yet, still lie in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.values import InFile
from moreh_ap.errors import ExactnessError, LoadError
from moreh_ap.parallelizer.state.checkpoint_shards import WrittenFile, problem_with
from moreh_ap.protocol.messages.tensors import SavedTensor
from moreh_ap.protocol.tensor_source import TensorSource
from moreh_ap.session.checkpoint.checkpoint_values import dtype_name, dtype_of
from moreh_ap.version import __version__

VERSION = 1
_JSON = "checkpoint.json"
_OURS = re.compile(r"[0-9a-f]{8}-((controller|worker\d+)\.safetensors|witness)|checkpoint\.json\.[0-9a-f]{8}")

FilesToCheck = tuple[tuple[str, int, "str | None"], ...]
"""Path, size in bytes and checksum of files; without a checksum only the size is looked at."""


class Checkpoint:
    """A complete checkpoint in a folder. As long as this object lives, this process does not remove its files.

    Attributes:
        folder: Its path.
        content: The content of `checkpoint.json`.
        tensors: Where every tensor lies, by its name.
    """

    def __init__(self, folder: str, content: dict[str, Any]) -> None:
        self.folder, self.content = folder, content
        self.tensors = {name: self._tensor(name, entry) for name, entry in content["tensors"].items()}
        _ALIVE.add(self)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, verify: bool) -> Checkpoint:
        """Reads `checkpoint.json`.

        Raises:
            LoadError: The file does not exist, or its content is not that of a save.
        """
        path = os.path.join(os.path.abspath(folder), _JSON)
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except FileNotFoundError:
            raise LoadError(
                f"{os.fspath(folder)} holds no checkpoint: there is no {_JSON} in it",
                "a folder that moreh_ap.save has completed",
                "moreh_ap.save(folder, model=model, optimizer=optimizer)",
            ) from None
        except ValueError as error:
            raise _damaged(path, f"it is no JSON: {error}") from error
        if not isinstance(content, dict) or content.get("format") != "moreh_ap checkpoint":
            raise _damaged(path, "it does not describe a checkpoint")
        if content.get("version", 0) > VERSION:
            raise LoadError(
                f"{path} has version {content['version']} of the format",
                f"versions up to {VERSION}, which moreh_ap {__version__} knows",
                "pip install --upgrade moreh-ap",
            )
        if verify and content.pop("sha256", None) != _sha256(content):
            raise _damaged(path, "its contents are not what was written: the checksum differs")
        try:
            return cls(os.path.dirname(path), content)
        except KeyError as error:
            raise _damaged(path, f"it lacks {error}") from error

    def files(self, *, verify: bool) -> FilesToCheck:
        """Returns path, size and checksum of the data files."""
        return tuple(
            (os.path.join(self.folder, name), entry["bytes"], entry["sha256"] if verify else None)
            for name, entry in self.content["files"].items()
        )

    def check(self, problems: dict[str, str]) -> None:
        """Raises if there are `problems` with files, ``{path: problem}``.

        Raises:
            LoadError: A file is damaged; the message names it.
        """
        for path, problem in sorted(problems.items()):
            raise _damaged(path, problem)

    def unread(self, name: str, dtype: torch.dtype) -> InFile:
        """Returns the value of a tensor, cast to `dtype`, without reading it."""
        saved = self.tensors[name]
        return InFile(saved.sources, saved.shape, dtype, keeper=self)

    def read(self, name: str) -> Tensor:
        """Returns a full tensor on the CPU."""
        return self.unread(name, self.tensors[name].dtype).read()

    def _tensor(self, name: str, entry: dict[str, Any]) -> SavedTensor:
        shape = tuple(entry["shape"])
        sources = tuple(
            TensorSource(
                os.path.join(self.folder, piece["file"]), piece["key"], tuple(piece["start"]), tuple(piece["size"])
            )
            for piece in entry["pieces"]
        )
        if sum(prod(source.size) for source in sources) != prod(shape):
            raise _damaged(os.path.join(self.folder, _JSON), f"the pieces of {name} are not the whole tensor")
        return SavedTensor(dtype_of(entry["dtype"]), shape, sources)


# Checkpoints whose files may still be read; a save that cleans a folder keeps these files.
_ALIVE: weakref.WeakSet[Checkpoint] = weakref.WeakSet()


class NewCheckpoint:
    """A checkpoint that is being written. See [Note: one step].

    Args:
        folder: The folder; created if it does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.path.abspath(folder)
        self._id = uuid.uuid4().hex[:8]
        os.makedirs(self._folder, exist_ok=True)

    def path(self, writer: str) -> str:
        """Returns the prefix of the file paths of `writer` ("controller", "worker")."""
        return os.path.join(self._folder, f"{self._id}-{writer}")

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
            files = write_files()
            for file in files:
                if file.failure:
                    raise OSError(f"{file.path}: {file.failure}")
            self._commit(self._describe(files, tensors) | content)
        except BaseException:  # a full disk, a lost worker, Ctrl-C: no files of this save may stay
            if not self._is_current():
                self._remove(name for name in os.listdir(self._folder) if self._id in name)
            raise
        self._remove(self._forgotten({os.path.basename(file.path) for file in files}))

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
        new = os.path.join(self._folder, f"{_JSON}.{self._id}")
        with open(new, "x", encoding="utf-8") as file:
            json.dump(content | {"sha256": _sha256(content)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self._folder)  # the names of the data files are on the disk before the one that names them
        os.replace(new, os.path.join(self._folder, _JSON))
        _sync_folder(self._folder)

    def _is_current(self) -> bool:
        """Returns whether `checkpoint.json` names the files of this save already."""
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self._folder, _JSON), encoding="utf-8") as file:
            return self._id in file.read()
        return False

    def _forgotten(self, current: set[str]) -> list[str]:
        """Returns our files in the folder that neither the new checkpoint nor values not read yet need."""
        needed = set(current)
        for checkpoint in _ALIVE:
            if checkpoint.folder == self._folder:
                needed.update(checkpoint.content["files"])
        return [name for name in os.listdir(self._folder) if _OURS.fullmatch(name) and name not in needed]

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(self._folder, name))


def problems_of(files: FilesToCheck) -> dict[str, str]:
    """Returns the problems of files, by path."""
    found = {path: problem_with(path, num_bytes, sha256) for path, num_bytes, sha256 in files}
    return {path: problem for path, problem in found.items() if problem}


def unknown(checkpoint: Checkpoint, kind: str, name: str) -> str:
    """Returns the text of the error for a model or optimizer that the checkpoint does not have."""
    return f"{checkpoint.folder} holds no {name!r} among its {kind}"


def some(names: list[str]) -> str:
    """Returns the first names of many, as text."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: str) -> None:
    """Flushes the names in a folder to the disk. Source: fsync(2)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(path: str, problem: str) -> LoadError:
    return LoadError(
        f"{path} is damaged: {problem}",
        "the files as moreh_ap.save wrote them",
        'moreh_ap.load("an_earlier_one", model=model, optimizer=optimizer)  # or copy this one again',
    )
