"""Whether workers reach each other and get the right values: `moreh-ap doctor`'s part that starts workers.

Decides what is tried, how long it may take, and what a failure says. Must not know how values are exchanged.

Every attempt has a time limit. One that hangs, or ends in an error, is reported with the workers concerned; the workers
are ended, and others are started for the attempts that are left, until too many have failed in this way.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from moreh_ap.errors import MorehError
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.toolkit.findings import FAILED, OK, WARNING, Finding
from moreh_ap.toolkit.link_worker import Collective, PointToPoint, Received

EXECUTOR = "moreh_ap.toolkit.link_worker:LinkExecutor"
COLLECTIVES = ("all_reduce", "all_gather", "broadcast")

MOST_BROKEN = 3
"""Meshes that may be lost before the rest is left untried."""

_FIRST_ANSWER_S = 60.0
"""Seconds that starting may take beyond the limit of an attempt: PyTorch is imported meanwhile."""

_FIXES = {
    "cuda": "with NCCL_P2P_DISABLE=1, or NCCL_SHM_DISABLE=1, in the environment it should work: the direct link, or "
    "shared memory, is what is broken; outside virtual machines, PCI ACS and the IOMMU have to be off",
    "cpu": "end programs that use up memory or cores; no firewall rule on the interface lo",
}
"""Source: NVIDIA, NCCL user guide, troubleshooting."""


def check_links(device_type: str, num_devices: int, timeout_s: float, executor: str = EXECUTOR) -> Iterator[Finding]:
    """Yields what is found: the start of the workers, each link that is wrong, and a line about all of them.

    Args:
        device_type: "cuda" or "cpu".
        num_devices: How many workers.
        timeout_s: Seconds that one attempt may take.
        executor: What the workers run.
    """
    links = _Links(device_type, num_devices, timeout_s, executor)
    try:
        started_s = time.monotonic()
        try:
            links.mesh()
        except (MorehError, TimeoutError) as error:
            yield Finding("workers", FAILED, f"{num_devices} on {device_type} do not start: {_one_line(error)}",
                          "the error above all; then memory, open files and loopback")  # fmt: skip
            return
        yield Finding("workers", OK, f"{num_devices} on {device_type} started in {time.monotonic() - started_s:.1f} s")
        pairs = [PointToPoint(*pair) for pair in itertools.permutations(range(num_devices), 2)]
        said = f"{len(pairs)} between pairs of workers, every value right" if pairs else "none: one worker has no other"
        yield from links.try_all("links", pairs, said)
        yield from links.try_all("collectives", [Collective(name) for name in COLLECTIVES],
                                 f"{', '.join(COLLECTIVES)}: every value right on every worker")  # fmt: skip
    finally:
        links.close()


class _Links:
    """Workers for one attempt after the other, started anew after a worker was lost."""

    def __init__(self, device_type: str, num_devices: int, timeout_s: float, executor: str) -> None:
        self._device_type, self._num_devices = device_type, num_devices
        self._timeout_s, self._executor = timeout_s, executor
        self._mesh: WorkerGroup | None = None
        self._broken = 0

    def mesh(self) -> WorkerGroup:
        """Returns workers that are ready.

        Raises:
            MeshStartError: They could not be started.
        """
        if self._mesh is None:
            start_s = self._timeout_s + _FIRST_ANSWER_S
            self._mesh = WorkerGroup(
                self._num_devices,
                device_type=self._device_type,
                threads_per_worker=1,
                executor=self._executor,
                preimport=(self._executor.partition(":")[0],),
                start_timeout_s=start_s,
                collective_timeout_s=start_s,
            )
            self._mesh.wait_ready(start_s)
        return self._mesh

    def close(self) -> None:
        """Ends the workers."""
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()

    def try_all(self, name: str, commands: Sequence[PointToPoint | Collective], all_well: str) -> Iterator[Finding]:
        """Yields a finding for each command that went wrong, and one for all if none did."""
        slowest, wrong = 0.0, 0
        for tried, command in enumerate(commands):
            if self._broken >= MOST_BROKEN:
                left = len(commands) - tried
                yield Finding(name, WARNING, f"{left} not tried: workers were lost {self._broken} times before")
                return
            said, seconds = self._try(command)
            slowest = max(slowest, seconds)
            if said:
                wrong += 1
                yield Finding(name, FAILED, said, _FIXES[self._device_type])
        if not wrong:
            figures = f"; 1 MiB took {slowest * 1000:.1f} ms at most" if slowest else ""
            yield Finding(name, OK, f"{all_well}{figures}")

    def _try(self, command: PointToPoint | Collective) -> tuple[str, float]:
        """Returns what went wrong, empty if nothing, and the seconds of the slowest message."""
        try:
            answers = self.mesh().submit(command, recoverable=True).result(self._timeout_s)
        except TimeoutError:
            return self._lost(f"{_name(command)}: no answer within {self._timeout_s:g} s"), 0.0
        except Exception as error:  # of any kind: what a worker or the process group raised is the finding
            return self._lost(f"{_name(command)}: {type(error).__name__}: {_one_line(error)}"), 0.0
        said = [
            f"{_name(command)}: {answer.num_wrong} of {answer.num_elements} values wrong on worker {rank}, "
            f"for example {answer.example}"
            for rank, answer in enumerate(answers)
            if answer is not None and answer.num_wrong
        ]
        return "; ".join(said), _slowest(answers)

    def _lost(self, said: str) -> str:
        self.close()  # what hangs is ended with its workers
        self._broken += 1
        return said


def _slowest(answers: list[Received | None]) -> float:
    return max((answer.seconds for answer in answers if answer is not None), default=0.0)


def _name(command: PointToPoint | Collective) -> str:
    if isinstance(command, PointToPoint):
        return f"worker {command.sender} to worker {command.receiver}"
    return command.name


def _one_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
