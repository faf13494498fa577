"""A process that the engine started and reaps, watched by us.

Decides how a process's end is noticed and how its exit status is learnt although another part of this process collects
it. Must not know what the process does.

The engine (Monarch 0.7) reaps its workers and reports how they ended, but not always: of 60 killed ones 3 were never
reported, five scripts running at once on two cores (22 November 2026).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import sys

# Source: Linux, include/uapi/linux/pidfd.h: struct pidfd_info as first published, PIDFD_GET_INFO, PIDFD_INFO_EXIT.
_PIDFD_INFO = struct.Struct("=QQ11Ii")  # the mask first, the exit status last
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


_PR_SET_PDEATHSIG = 1  # Source: Linux, include/uapi/linux/prctl.h


def end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Takes `end_with` back."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


class Child:
    """A child process that another process waits for.

    Args:
        pid: its process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor: int | None = None
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # it is gone already, or the kernel has no such descriptors
                self._descriptor = os.pidfd_open(pid)

    def is_alive(self) -> bool:
        """Returns whether the process is still there; False only once it has been collected."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def exit_code(self) -> int | None:
        """Returns how a collected process ended, as `subprocess` counts: the negative number of a signal, or its exit
        code. None while it lives, and where the kernel does not tell (Linux before 6.15, other systems)."""
        if self._descriptor is None:
            return None
        import fcntl  # Linux has it; this module is imported elsewhere too

        info = bytearray(_PIDFD_INFO.size)
        info[:8] = _PIDFD_INFO_EXIT.to_bytes(8, sys.byteorder)
        try:
            fcntl.ioctl(self._descriptor, _PIDFD_GET_INFO, info)
        except OSError:
            return None
        mask, *_, status = _PIDFD_INFO.unpack(info)
        return os.waitstatus_to_exitcode(status) if mask & _PIDFD_INFO_EXIT else None

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class RemoteChild:
    """A process on another host, whose agent tells of its end.

    Args:
        pid: its process id there.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._has_ended = False
        self._code: int | None = None

    def ended(self, code: int | None) -> None:
        """Notes that the agent has reported its end."""
        self._code = code
        self._has_ended = True

    def is_alive(self) -> bool:
        """Returns whether the agent has not reported its end."""
        return not self._has_ended

    def exit_code(self) -> int | None:
        """Returns how it ended, as far as its agent knows."""
        return self._code

    def close(self) -> None:
        """Gives nothing back: there is no descriptor."""


def kill_group(pid: int) -> None:
    """Ends a process and those that it has started, at once."""
    try:
        # Workers lead process groups of their own. If this one should not, its group may be the script's.
        leads = os.getpgid(pid) == pid
    except ProcessLookupError:
        leads = True  # gone already; what it started may still be there, in the group that it led
    with contextlib.suppress(ProcessLookupError):
        if leads:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def how_ended(code: int) -> str:
    """Returns how a process ended, in words, from its exit code: negative after a signal."""
    return f"killed by signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
