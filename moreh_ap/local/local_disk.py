"""A folder on a disk of this machine, for files that a process needs only while it lives.

Decides what is no local disk: a file system in memory, or of another machine. Must not know what is written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import NamedTuple

import psutil

NOT_LOCAL = ("tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "9p")
"""File systems in memory, and of other machines. Others of those are programs of the user: `fuse.` and a name."""

_OTHER_FOLDER = "/var/tmp"
"""Where the folder for temporary files is none on a disk. Source: Filesystem Hierarchy Standard 3.0, section 5.15."""


class DiskFolder(NamedTuple):
    """A folder, and the bytes that were free there when it was looked at."""

    path: str
    free_bytes: int

    def now_free_bytes(self) -> int:
        """Returns the bytes that are free there now."""
        return shutil.disk_usage(self.path).free

    def unnamed_file(self, name: str) -> int:
        """Returns the descriptor of a new file that the system removes with this process, however that ends.

        Args:
            name: By which the descriptor is known in /proc, though no folder has it.

        Raises:
            OSError: None can be made there.
        """
        path = os.path.join(self.path, name)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.unlink(path)
        return descriptor


def disk_folder() -> DiskFolder | None:
    """Returns the folder for temporary files on a local disk; None where there is none."""
    for folder in (tempfile.gettempdir(), _OTHER_FOLDER):
        if os.path.isdir(folder) and os.access(folder, os.W_OK) and _is_local(os.path.realpath(folder)):
            return DiskFolder(folder, shutil.disk_usage(folder).free)
    return None


def _is_local(folder: str) -> bool:
    mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    while folder not in mounted and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    kind = mounted.get(folder, "")
    return kind not in NOT_LOCAL and not kind.startswith("fuse.")
