"""A checkpoint in a folder: the file that describes it, where its tensors lie, how it is checked.

Decides the format. Must not know models, optimizers or workers, or how a checkpoint is written (`new_checkpoint`).

[Note: earlier checkpoints]
`checkpoint.json` describes the last checkpoint of a folder, ``checkpoint-000012.json`` the twelfth, if it is an earlier
one that is kept. Whoever loads takes the last one that is whole, and says which are not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
import weakref
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moreh_ap.device.values import InFile
from moreh_ap.errors import LoadError
from moreh_ap.parallelizer.state.checkpoint_files import problem_with
from moreh_ap.protocol.messages.tensors import SavedTensor
from moreh_ap.protocol.tensor_source import TensorSource
from moreh_ap.session.checkpoint.checkpoint_values import dtype_of
from moreh_ap.version import __version__

VERSION = 1
DESCRIPTION = "checkpoint.json"
_EARLIER = re.compile(r"checkpoint-(\d{6,})\.json")
_MOST_LOOKS = 10  # at a folder into which another run saves

FilesToCheck = tuple[tuple[str, int, "str | None"], ...]
"""Path, size in bytes and checksum of files; without a checksum only the size is looked at."""


class Damage(NamedTuple):
    """What is wrong with a file of a checkpoint."""

    path: str
    problem: str

    def error(self) -> LoadError:
        """Returns the error of a checkpoint that cannot be loaded for it."""
        return LoadError(
            f"{self.path} is damaged: {self.problem}",
            "the files as moreh_ap.save wrote them",
            'moreh_ap.load("an_earlier_one", model=model, optimizer=optimizer)  # or copy this one again',
        )


class Checkpoint:
    """A complete checkpoint in a folder.

    As long as an object that `open_last_whole` has returned lives, this process does not remove its files.

    Attributes:
        folder: Its path.
        content: The content of `checkpoint.json`.
        tensors: Where every tensor lies, by its name.
    """

    def __init__(self, folder: str, content: dict[str, Any]) -> None:
        self.folder, self.content = folder, content
        self.tensors = {name: self._tensor(name, entry) for name, entry in content["tensors"].items()}

    @classmethod
    def open(cls, path: str, *, verify: bool) -> Checkpoint | Damage:
        """Reads the file that describes a checkpoint; returns what is wrong with it if it is not what was written.

        Raises:
            LoadError: A later version wrote it.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except OSError as error:
            return Damage(path, f"it cannot be read: {error.strerror}")
        except ValueError as error:
            return Damage(path, f"it is no JSON: {error}")
        if not isinstance(content, dict) or content.get("format") != "moreh_ap checkpoint":
            return Damage(path, "it does not describe a checkpoint")
        if content.get("version", 0) > VERSION:
            raise LoadError(
                f"{path} has version {content['version']} of the format",
                f"versions up to {VERSION}, which moreh_ap {__version__} knows",
                "pip install --upgrade moreh-ap",
            )
        if verify and content.pop("sha256", None) != digest_of(content):
            return Damage(path, "its contents are not what was written: the checksum differs")
        try:
            checkpoint = cls(os.path.dirname(path), content)
        except (AttributeError, KeyError, TypeError) as error:
            return Damage(path, f"it lacks {error}")
        for name, saved in checkpoint.tensors.items():
            if sum(prod(source.size) for source in saved.sources) != prod(saved.shape):
                return Damage(path, f"the pieces of {name} are not the whole tensor")
        return checkpoint

    @property
    def id(self) -> str:
        """A key that no other checkpoint has."""
        return str(self.content.get("id", self.content.get("sha256", "")))

    @property
    def number(self) -> int:
        """How many checkpoints of its folder, with it, were saved until then."""
        return int(self.content.get("number", 0))

    @property
    def saved_at(self) -> str:
        """When it was saved and by which process, in words."""
        saved = self.content.get("saved", {})
        return f"saved {saved.get('at', 'at some time')} by {saved.get('by', 'an earlier version')}"

    def files(self, *, verify: bool) -> FilesToCheck:
        """Returns path, size and checksum of the data files."""
        return tuple(
            (os.path.join(self.folder, name), entry["bytes"], entry["sha256"] if verify else None)
            for name, entry in self.content["files"].items()
        )

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
        return SavedTensor(dtype_of(entry["dtype"]), shape, sources)


# Checkpoints whose files may still be read; a save that cleans a folder keeps these files.
_ALIVE: weakref.WeakSet[Checkpoint] = weakref.WeakSet()


def files_in_use(folder: str) -> set[str]:
    """Returns the files of a folder in which values of this process lie that it has not read yet."""
    return {name for checkpoint in _ALIVE if checkpoint.folder == folder for name in checkpoint.content["files"]}


def descriptions(folder: str) -> list[str]:
    """Returns the paths of the files that describe a folder's checkpoints, the last one first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    earlier = sorted(((int(found[1]), name) for name in names if (found := _EARLIER.fullmatch(name))), reverse=True)
    last = [DESCRIPTION] if DESCRIPTION in names else []
    return [os.path.join(folder, name) for name in (*last, *(name for _, name in earlier))]


def earlier_name(number: int) -> str:
    """Returns the name under which the description of a checkpoint is kept once there is a later one."""
    return f"checkpoint-{number:06d}.json"


def open_last_whole(
    folder: str | os.PathLike[str], *, verify: bool, find_problems: Callable[[FilesToCheck], dict[str, str]]
) -> Checkpoint:
    """Returns the last checkpoint of a folder of which nothing is damaged; a warning names later ones that are.

    What another run removes meanwhile, since it has saved later ones, is no damage: the later ones are looked at.

    Args:
        folder: The folder.
        verify: Whether to compare checksums.
        find_problems: Looks at files and returns ``{path: problem}``.

    Raises:
        LoadError: There is no checkpoint, or each is damaged.
    """
    for _ in range(_MOST_LOOKS):
        seen = _versions(folder)
        opened, damages = _last_whole(folder, verify=verify, find_problems=find_problems)
        if not damages or _versions(folder) == seen:
            break
    if opened is not None:
        if damages:
            facts = "; ".join(f"{damage.path} is damaged: {damage.problem}" for damage in damages)
            warnings.warn(f"{facts}. The checkpoint before it is loaded, {opened.saved_at}.", stacklevel=3)
        return opened
    if damages:
        raise damages[0].error()
    raise LoadError(
        f"{os.fspath(folder)} holds no checkpoint: there is no {DESCRIPTION} in it",
        "a folder that moreh_ap.save has completed",
        "moreh_ap.save(folder, model=model, optimizer=optimizer)",
    )


def _last_whole(
    folder: str | os.PathLike[str], *, verify: bool, find_problems: Callable[[FilesToCheck], dict[str, str]]
) -> tuple[Checkpoint | None, list[Damage]]:
    """Returns the last checkpoint of which nothing is damaged, and what is damaged of later ones."""
    damages: list[Damage] = []
    for path in descriptions(os.path.abspath(folder)):
        opened = Checkpoint.open(path, verify=verify)
        if isinstance(opened, Damage):
            damages.append(opened)
            continue
        _ALIVE.add(opened)
        problems = find_problems(opened.files(verify=verify))
        if problems:
            damages.append(Damage(*min(problems.items())))
            continue
        return opened, damages
    return None, damages


def _versions(folder: str | os.PathLike[str]) -> list[tuple[str, int, int]]:
    """Returns what changes when something is saved into a folder: which checkpoints it has, and their files."""
    found = []
    for path in descriptions(os.path.abspath(folder)):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path)
            found.append((path, status.st_ino, status.st_mtime_ns))
    return found


def last_saved(folder: str) -> str:
    """Returns when the last checkpoint of a folder was saved, in words; empty: it has none that can be read."""
    for path in descriptions(os.path.abspath(folder)):
        opened = Checkpoint.open(path, verify=False)
        if isinstance(opened, Checkpoint):
            return opened.saved_at
    return ""


def problems_of(files: FilesToCheck) -> dict[str, str]:
    """Returns the problems of files, by path."""
    found = {path: problem_with(path, num_bytes, sha256) for path, num_bytes, sha256 in files}
    return {path: problem for path, problem in found.items() if problem}


def unknown(checkpoint: Checkpoint, kind: str, name: str) -> LoadError:
    """Returns the error for what a checkpoint does not have; `kind` is "models" or "optimizers"."""
    one = kind.removesuffix("s")
    names = [known.removeprefix(f"{one}.") for known in checkpoint.content[kind]]
    given = ", ".join(f'"{known}": {known}' for known in names if known.isidentifier())
    arguments = one if names == [one] else f"{{{given}}}"
    return LoadError(
        f"{checkpoint.folder} holds no {name!r} among its {kind}",
        ", ".join(names) or f"a checkpoint that was saved with {kind}",
        f'moreh_ap.load("{checkpoint.folder}", {one}={arguments})' if given else "",
    )


def other_model(checkpoint: Checkpoint, fact: str) -> LoadError:
    """Returns the error for a model that is not the one that was saved."""
    return LoadError(
        fact,
        "a model with the same parameters and buffers, in the same shapes, as the one that was saved",
        f'moreh_ap.load("{checkpoint.folder}", model=model)  # made with the settings of the run that saved it',
    )


def some(names: list[str]) -> str:
    """Returns the first names of many, as text."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def digest_of(content: dict[str, Any]) -> str:
    """Returns the checksum of the content of a description."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
