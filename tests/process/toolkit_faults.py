"""Workers with broken links, for the tests of `moreh-ap doctor`."""

from __future__ import annotations

import os
import signal
import time

from torch import Tensor

from moreh_ap.toolkit.link_worker import LinkExecutor


class Wrong(LinkExecutor):
    """What worker 1 sends arrives with an element changed; worker 1 sums wrongly."""

    def send(self, values: Tensor, receiver: int) -> None:
        if self.rank == 1:
            values[len(values) // 2] += 1
        super().send(values, receiver)

    def run_collective(self, name: str, size: int) -> tuple[Tensor, Tensor, float]:
        got, expected, seconds = super().run_collective(name, size)
        if name == "all_reduce" and self.rank == 1:
            got = got * 0
        return got, expected, seconds


class Hanging(LinkExecutor):
    """Worker 0 never sends."""

    def send(self, values: Tensor, receiver: int) -> None:
        if self.rank == 0:
            time.sleep(3600)
        super().send(values, receiver)


class Dying(LinkExecutor):
    """Worker 1 is killed as soon as it should send."""

    def send(self, values: Tensor, receiver: int) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().send(values, receiver)
