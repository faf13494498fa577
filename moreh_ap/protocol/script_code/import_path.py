"""Folders that the script adds to its import path after its workers were started: ``sys.path.insert(0, "src")``.

Decides which of them workers get, and where in their own path. Must not know when they are sent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from moreh_ap.hosts import host_files


def folders_of(path: Sequence[str]) -> list[str]:
    """Returns the entries of an import path, each once and absolute; an empty one means the working directory.

    Example:
        >>> folders_of(["/job", "/lib/../src", "/job"])
        ['/job', '/lib/../src']
    """
    here = os.getcwd()
    return list(dict.fromkeys(os.path.join(here, entry) if entry else here for entry in path if isinstance(entry, str)))


class AddedFolder(NamedTuple):
    """A folder that the script imports from since.

    Attributes:
        folder: Its absolute path.
        before: The older entry of the script's path that follows it; empty: none follows.
    """

    folder: str
    before: str


class ImportPath:
    """The import path as the workers know it.

    Args:
        known: The entries with which they were started; None: those of this process now.

    Example:
        >>> path = ImportPath(["/job", "/lib"])
        >>> path.news(["/job", "/job/src", "/lib"])
        (AddedFolder(folder='/job/src', before='/lib'),)
        >>> path.news(["/job", "/job/src", "/lib"])
        ()
    """

    def __init__(self, known: Sequence[str] | None = None) -> None:
        self._known = set(folders_of(sys.path if known is None else known))

    def news(self, present: Sequence[str] | None = None) -> tuple[AddedFolder, ...]:
        """Returns the entries that were added since this was asked, in their order.

        Args:
            present: The script's path; None: that of this process now.
        """
        added: list[AddedFolder] = []
        before = ""
        for folder in reversed(folders_of(sys.path if present is None else present)):
            if folder in self._known:
                before = folder
            else:
                added.insert(0, AddedFolder(folder, before))
        self._known.update(one.folder for one in added)
        return tuple(added)


def add_here(added: Sequence[AddedFolder]) -> None:
    """Has this process, a worker, import from these folders too, at the places that they have in the script's path."""
    for folder, before in added:
        following = [own for own in host_files.import_folders(before) if own in sys.path] if before else []
        place = sys.path.index(following[0]) if following else len(sys.path)
        sys.path[place:place] = [own for own in host_files.import_folders(folder) if own not in sys.path]
