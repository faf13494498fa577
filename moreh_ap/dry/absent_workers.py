"""The replacement of the workers in a dry run: it has no processes, and answers questions about devices only.

Decides the answers. Must not know what the script is run for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moreh_ap.errors import UnsupportedError
from moreh_ap.local.jobs import Job
from moreh_ap.protocol.messages.devices import DescribeDevice, DeviceInfo, ReportMemory
from moreh_ap.protocol.messages.stream import ImportModules, Synchronize
from moreh_ap.runtime.future import Reply
from moreh_ap.runtime.worker_group import WorkerGroup


class AbsentWorkers(WorkerGroup):
    """Answers for so many equal devices at once.

    Args:
        info: One of the devices.
        num_workers: Their number.
        device_type: "cuda" or "cpu".
    """

    def __init__(self, info: DeviceInfo, num_workers: int, device_type: str) -> None:
        self.num_workers, self.device_type, self.shares_memory = num_workers, device_type, True
        self.num_waits, self.keeps_commands, self.keeps_values = 0, False, False
        self.wanted, self._info = None, info

    @property
    def pids(self) -> list[int]:
        return []

    def submit(self, command: Any, *, recoverable: bool = False) -> Reply:
        answers = [self._answer(one) for one in command.commands]
        reply = Reply()
        reply.group, reply.number = self, 0
        reply.set_result([answers] * self.num_workers)
        return reply

    def _answer(self, command: Any) -> Any:
        if isinstance(command, DescribeDevice):
            return self._info
        if isinstance(command, ReportMemory):
            total = self._info.memory_bytes
            return {"allocated": 0, "peak": 0, "free": total, "total": total}
        if isinstance(command, (ImportModules, Synchronize)):
            return None
        raise UnsupportedError(
            f"a dry run has no workers, and {type(command).__name__} needs them",
            "what a script does before its first call of a model",
            "python train.py",
            "docs/dry-run.md#errors",
        )

    def answers(self, reply: Reply, timeout_s: float | None = None) -> list[Any]:
        return super(Reply, reply).result(timeout_s)

    def drain(self) -> None:
        """Nothing is outstanding."""

    def check(self) -> None:
        """No command has failed."""

    def provide(self, files: Sequence[str]) -> None:
        """Nobody reads them."""

    def is_stopped(self) -> bool:
        return False

    def when_forgotten(self, callback: Callable[[], object]) -> None:
        callback()

    def close(self) -> None:
        """There is nothing to end."""


class UnlistedJob(Job):
    """The entry of a process that takes no devices: other programs do not see it."""

    def __init__(self) -> None:
        self._entry = None

    def _change(self, **changes: Any) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """There is no entry."""
