"""Files that the controller sends to a host.

Decides where such a file lies on the host, and under which path a worker there opens what the controller calls by its
own path. Must not know which files are sent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

FOLDER_VARIABLE = "MOREH_AP_HOST_FILES"
"""Set in workers on other hosts: where sent files lie."""

SCRIPT, DATA = "script", "data"
"""The two folders below it: modules beside the script, under their own paths; other files, each under `sent_name`."""

PIECE_BYTES = 4 << 20


def path_here(file: str) -> str:
    """Returns where this process opens what the controller calls `file`."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return file
    sent = os.path.join(folder, DATA, sent_name(file))
    return sent if os.path.exists(sent) else file


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
        place = self.folder / area / name
        if area not in (SCRIPT, DATA) or not place.resolve().is_relative_to((self.folder / area).resolve()):
            raise ValueError(f"{area}/{name} is outside of {self.folder}")
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(place, "wb" if is_first else "ab") as file:
            file.write(piece)
