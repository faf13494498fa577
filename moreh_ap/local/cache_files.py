"""Files in which a machine remembers what was found out on it.

Decides where they are and how they are written. Must not know their content. People may read a file, and delete it at
any time; a broken file counts as empty. Several processes may write one: each adds its entry to those of the others.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

FOLDER_VARIABLE = "MOREH_AP_CACHE"


def cache_folder() -> Path:
    """Returns the folder of all such files; the variable is read anew each time."""
    folder = os.environ.get(FOLDER_VARIABLE, "").strip()
    return Path(folder) if folder else Path.home() / ".cache" / "moreh_ap"


def write_whole(path: Path, text: str) -> None:
    """Writes a file all at once: a reader never sees half of it.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


class CacheFile:
    """Entries by key, in a file below `MOREH_AP_CACHE`, or else below `~/.cache/moreh_ap`.

    Where the file cannot be written, a process knows its own entries as long as it runs.

    Args:
        name: Name of the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._unwritten: dict[tuple[Path, str], dict[str, Any]] = {}

    @property
    def path(self) -> Path:
        """The file."""
        return cache_folder() / self._name

    def look_up(self, key: str) -> dict[str, Any] | None:
        """Returns the entry of this key, None if there is none."""
        entry = self._read().get(key)
        return entry if isinstance(entry, dict) else self._unwritten.get((self.path, key))

    def keep(self, key: str, entry: dict[str, Any]) -> None:
        """Writes an entry.

        Raises:
            OSError: The file cannot be written.
        """
        path = self.path
        self._unwritten[path, key] = entry
        with _alone(path):
            write_whole(path, json.dumps({**self._read(), key: entry}, indent=1, ensure_ascii=False) + "\n")
        self._unwritten.pop((path, key), None)  # another thread may have written it as well

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # there is none yet, or it is broken: it is written anew
        return entries if isinstance(entries, dict) else {}


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Waits until no other process changes a file. Where the file system has no locks, none is waited for.

    Raises:
        OSError: Its folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(NotImplementedError):  # so says the library for such a file system
            held.enter_context(FileLock(f"{path}.lock"))
        yield
