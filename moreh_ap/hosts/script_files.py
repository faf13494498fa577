"""The modules beside a script, for hosts that do not share its file system.

Decides which files belong to a script, when a host has the same ones, and which are sent. Must not know how they
travel.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MOST_FILES = 2000
MOST_BYTES = 20 << 20

_NO_MODULES = {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist", "wandb"}


@dataclass(frozen=True)
class ScriptFolder:
    """The folder of a script.

    Attributes:
        path: Where it is.
        identity: Numbers by which another host knows that it sees the same folder, see `identity_of`.
        digests: The digest of each Python file in it, by its path below it.
        is_whole: Whether all are in `digests`; a folder has at most `MOST_FILES` files and `MOST_BYTES` bytes.
    """

    path: str
    identity: tuple[int, ...]
    digests: Mapping[str, str]
    is_whole: bool = True


def script_folder() -> str:
    """Returns the folder of this process's script; of an interactive process the working directory."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(main)) if main else os.getcwd()


def look_at(folder: str) -> ScriptFolder:
    """Returns what is in the folder of this process's script."""
    digests: dict[str, str] = {}
    num_bytes = 0
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name.isidentifier() and name not in _NO_MODULES)
        for name in sorted(name for name in files if name.endswith(".py")):
            path = Path(parent, name)
            try:
                content = path.read_bytes()
            except OSError:  # a link that leads nowhere, or a file of another user: no module of the script
                continue
            num_bytes += len(content)
            digests[path.relative_to(folder).as_posix()] = _digest(content)
            if len(digests) > MOST_FILES or num_bytes > MOST_BYTES:
                return ScriptFolder(folder, identity_of(folder), {}, is_whole=False)
    return ScriptFolder(folder, identity_of(folder), digests)


def identity_of(path: str) -> tuple[int, ...]:
    """Returns numbers that are equal on two hosts where both see one file or folder of a shared file system, and
    otherwise practically never: its number in the file system, its size and when it was changed; empty where it is
    missing."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def different_on_this_host(folder: str, digests: Mapping[str, str]) -> list[str]:
    """Returns the files that this host does not have in the folder, or not as they are on the controller."""
    different = []
    for name, digest in digests.items():
        try:
            here = _digest(Path(folder, name).read_bytes())
        except OSError:
            here = ""
        if here != digest:
            different.append(name)
    return different


def to_send(digests: Mapping[str, str], different: list[str]) -> list[str]:
    """Returns the files to be sent: every file of each module or package of which one differs, since a package is
    imported from one folder only."""
    tops = {name.partition("/")[0] for name in different}
    return [name for name in digests if name.partition("/")[0] in tops]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
