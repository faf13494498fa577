"""Sockets of the controller that only this user can reach.

Decides where the engine's sockets are, and closes those that any user of the machine could reach. Must not know the
engine.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path

_LONGEST_FOLDER_BYTES = 60  # Linux allows 107 bytes for a socket's whole path
_NAME = re.compile(r"moreh-\d+-\w{8}")
_LOCK = "lock-of-moreh-ap"
_YOUNG_S = 60.0  # a folder that may not be locked yet
_ABSTRACT_NAME = re.compile(r"@[A-Za-z0-9]{24}")  # as the engine makes them up

_folder: tuple[int, Path] | None = None  # of this process: a forked child makes its own


def run_folder() -> Path:
    """Returns the folder for the sockets of this process, made at the first call: only this user can enter it."""
    global _folder
    if _folder is None or _folder[0] != os.getpid():
        place = tempfile.gettempdir()
        place = place if len(place) < _LONGEST_FOLDER_BYTES else "/tmp"
        _remove_abandoned(Path(place))
        _folder = os.getpid(), Path(tempfile.mkdtemp(prefix=f"moreh-{os.getpid()}-", dir=place))
        (_folder[1] / _LOCK).touch(mode=0o600)
        _lock(_folder[1])  # while this process lives
        atexit.register(_remove, *_folder)
    return _folder[1]


def _lock(folder: Path) -> int | None:
    """Takes the lock of a folder; returns its file descriptor, None if another process has the lock."""
    import fcntl  # not on all systems on which this module is imported

    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(place: Path) -> None:
    """Removes the folders of runs of this user whose controller and agents were all killed at once."""
    for folder in place.glob("moreh-*-*"):
        try:
            status = folder.lstat()
            is_ours = (
                stat.S_IMODE(status.st_mode) == 0o700 and stat.S_ISDIR(status.st_mode) and _NAME.fullmatch(folder.name)
            )
            if not is_ours or status.st_uid != os.getuid() or time.time() - status.st_mtime < _YOUNG_S:
                continue
            descriptor = _lock(folder)
        except OSError:  # it has no lock, or another process removes it
            continue
        if descriptor is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def abstract_listeners() -> set[str]:
    """Returns the names of listening sockets in the abstract namespace that may be the engine's. Linux has such."""
    return {name for name, _ in _listening()}


def close(names: set[str]) -> None:
    """Closes the sockets of this process that listen at `names`, keeping the numbers of their descriptors in use."""
    inodes = {inode for name, inode in _listening() if name in names}
    for descriptor in os.listdir("/proc/self/fd") if inodes else ():
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # of `listdir` itself, or closed by another thread meanwhile
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, int(descriptor), inheritable=False)
            os.close(nothing)


def _listening() -> list[tuple[str, str]]:
    """Returns name and inode of each listening stream socket in the abstract namespace.

    Source: proc(5), /proc/net/unix: number, references, protocol, flags (__SO_ACCEPTCON = 0x10000), type, state, inode,
    path.
    """
    table = Path("/proc/net/unix")
    if not table.exists():
        return []
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [
        (row[7], row[6]) for row in rows if len(row) == 8 and row[3] == "00010000" and _ABSTRACT_NAME.fullmatch(row[7])
    ]


def _remove(pid: int, folder: Path) -> None:
    if pid == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
