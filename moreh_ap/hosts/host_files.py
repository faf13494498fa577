"""Files that the controller sends to a host, and those that it takes from there.

Decides where such a file lies on the host, and under which path a worker there opens, or writes, what the controller
calls by its own path. Must not know which files these are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDER_VARIABLE, SCRIPT_VARIABLE = "MOREH_AP_HOST_FILES", "MOREH_AP_SCRIPT_FOLDER"
"""Set in workers on other hosts: where sent files lie; the controller's path of the script's folder."""

SCRIPT, DATA, WRITTEN = "script", "data", "written"
"""The folders below it: modules beside the script, under their own paths; other files, each under `sent_name`; what
workers have written and the controller takes, under the names that it is to have."""

PIECE_BYTES = 4 << 20


def path_here(file: str) -> str:
    """Returns where this process opens what the controller calls `file`."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return file
    sent = os.path.join(folder, DATA, sent_name(file))
    return sent if os.path.exists(sent) else file


def import_folders(folder: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns where a worker looks for the modules that the controller imports from `folder`, most wanted first.

    Args:
        folder: An absolute path.
        environment: The worker's.
    """
    files, script = environment.get(FOLDER_VARIABLE), environment.get(SCRIPT_VARIABLE)
    if not files or not script:
        return [folder]
    below = os.path.relpath(folder, script)
    is_outside = below == os.pardir or below.startswith(os.pardir + os.sep)
    return [folder] if is_outside else [os.path.normpath(os.path.join(files, SCRIPT, below)), folder]


def path_to_write(file: str, witness: str) -> str:
    """Returns where this process writes what the controller is to have as `file`.

    Files that an earlier, interrupted save has left here under this process's name are removed.

    Args:
        file: The path; what follows the first dash of its name is one process's alone.
        witness: A file that the controller has made beside it. A host without it does not share the folder.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or os.path.exists(witness):
        return file
    own = Path(folder, WRITTEN)
    own.mkdir(mode=0o700, exist_ok=True)
    name = os.path.basename(file)
    for earlier in own.glob(f"*-{name.partition('-')[2]}"):
        earlier.unlink()
    return str(own / name)


def sent_name(file: str) -> str:
    """Returns the name under which a file is kept on a host."""
    return hashlib.sha256(os.fsencode(file)).hexdigest()


def pieces(path: str) -> Iterator[bytes]:
    """Yields the content of a file, one piece after the other; an empty file is one piece."""
    with open(path, "rb") as file:
        yield file.read(PIECE_BYTES)
        while piece := file.read(PIECE_BYTES):
            yield piece


def digest(path: str) -> str:
    """Returns the digest of a file's content."""
    found = hashlib.sha256()
    for piece in pieces(path):
        found.update(piece)
    return found.hexdigest()


class HostFiles:
    """The host's side.

    Args:
        folder: A folder that only this user can enter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, area: str, name: str, piece: bytes, *, is_first: bool) -> None:
        """Writes the first piece of a file, or appends the next one.

        Raises:
            OSError: The disk is full.
            ValueError: The name leads out of the folder.
        """
        place = self._place(area, name, (SCRIPT, DATA))
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(place, "wb" if is_first else "ab") as file:
            file.write(piece)

    def read_piece(self, name: str, start: int) -> bytes:
        """Returns a piece of a file that a worker has written; empty where it has ended.

        Raises:
            OSError: It cannot be read.
            ValueError: The name leads out of the folder.
        """
        with open(self._place(WRITTEN, name, (WRITTEN,)), "rb") as file:
            file.seek(start)
            return file.read(PIECE_BYTES)

    def remove(self, name: str) -> None:
        """Removes a file that a worker has written, if it is there.

        Raises:
            ValueError: The name leads out of the folder.
        """
        self._place(WRITTEN, name, (WRITTEN,)).unlink(missing_ok=True)

    def _place(self, area: str, name: str, allowed: tuple[str, ...]) -> Path:
        place = self.folder / area / name
        if area not in allowed or not place.resolve().is_relative_to((self.folder / area).resolve()):
            raise ValueError(f"{area}/{name} is outside of {self.folder}")
        return place
