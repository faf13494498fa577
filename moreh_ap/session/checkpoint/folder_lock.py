"""Which process saves into a checkpoint's folder: one at a time, on this machine and on others that share the folder.

Decides how long a save waits for that of another process. Must not know what is saved.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from io import TextIOWrapper

LOCK_FILE = "checkpoint.lock"
LOCK_WAITS_S = 300.0
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLock:
    """The right to save into a folder; the system takes it back from a process that ends, however it ends.

    A process that has it already gets it once more. Where the file system has no locks, every process gets it.

    Args:
        folder: An existing folder.
        waits_s: How long to wait for another process.

    Raises:
        TimeoutError: Another process has had it all the time; the message names it.
    """

    def __init__(self, folder: str, waits_s: float = LOCK_WAITS_S) -> None:
        path = os.path.join(folder, LOCK_FILE)
        self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - open as long as it is locked
        until_s = time.monotonic() + waits_s
        # Locks of fcntl(2), unlike those of flock(2), do not pass to forked processes, and work on NFS.
        while not _lock(self._file):
            if time.monotonic() >= until_s:
                self._file.seek(0)
                holder = self._file.read().strip() or "another process"
                self._file.close()
                raise TimeoutError(
                    errno.ETIMEDOUT, f"{holder} has been saving into this folder for {waits_s:.0f} s", folder
                )
            time.sleep(0.02)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Lets others save."""
        self._file.close()


def _lock(file: TextIOWrapper) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        if error.errno in _HELD:
            return False
        raise
    return True
