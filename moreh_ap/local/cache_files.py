"""Files in which a machine remembers what was found out on it.

Decides where they are and how they are written. Must not know their content. People may read a file, and delete it at
any time; a broken file counts as empty.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

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

    Args:
        name: Name of the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def path(self) -> Path:
        """The file."""
        return cache_folder() / self._name

    def look_up(self, key: str) -> dict[str, Any] | None:
        """Returns the entry of this key, None if there is none."""
        entry = self._read().get(key)
        return entry if isinstance(entry, dict) else None

    def keep(self, key: str, entry: dict[str, Any]) -> None:
        """Writes an entry.

        Raises:
            OSError: The file cannot be written.
        """
        write_whole(self.path, json.dumps({**self._read(), key: entry}, indent=1, ensure_ascii=False) + "\n")

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # there is none yet, or it is broken: it is written anew
        return entries if isinstance(entries, dict) else {}
