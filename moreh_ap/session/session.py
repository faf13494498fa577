"""The controller's side of one accelerator: its workers, its random stream, and the tensors that workers keep.

A session is made by the one line and lives until the process ends. It must not know how a model is called or stepped:
that is `model`, `call` and `optimizer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from moreh_ap.local.jobs import Job
from moreh_ap.plan import Plan
from moreh_ap.protocol.messages.devices import DescribeDevice, DeviceInfo, ReportMemory
from moreh_ap.protocol.messages.state import ReadState, WriteState
from moreh_ap.protocol.messages.stream import Synchronize
from moreh_ap.protocol.messages.tensors import StateRef, TensorData
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.calls.call_extensions import CallExtensions
from moreh_ap.session.outbox import Outbox
from moreh_ap.session.rng_streams import AcceleratorGenerator
from moreh_ap.session.traffic import Traffic
from moreh_ap.settings import Options


class StepObserver(Protocol):
    """Told of every optimizer step that is sent."""

    def stepped(self) -> None: ...


class Session:
    """Owns the workers and the order of everything they are told.

    Args:
        options: What the script asked for.
        start_workers: Starts the worker processes and returns at once.
        job: How other programs see this process and its workers.
        generator: Where remote forwards get random numbers from.
    """

    def __init__(
        self, options: Options, start_workers: Callable[[], WorkerGroup], job: Job, generator: AcceleratorGenerator
    ) -> None:
        self.options, self._start_workers, self.job = options, start_workers, job
        self.workers = start_workers()
        self.num_devices = self.workers.num_workers
        self.generator = generator
        self.outbox = Outbox(self.workers)
        self.traffic = Traffic()
        self.watch: StepObserver | None = None
        self.trial_plan: Plan | None = None  # see `trying`
        self._devices: list[DeviceInfo] | None = None
        self.extensions: CallExtensions  # set by `session_backend`
        self.lay_out_again: Callable[[Any, Plan, str], bool] | None = None  # see `recovery`
        self.script_only_hooks: set[int] = set()  # see `script_hooks.RunsInScriptOnly`

    @contextlib.contextmanager
    def trying(self, plan: Plan) -> Iterator[None]:
        """Models that are called for the first time inside use `plan`, unverified and without a line in the log."""
        before, self.trial_plan = self.trial_plan, plan
        try:
            yield
        finally:
            self.trial_plan = before

    def stop_watching(self) -> None:
        """Nothing more is compared with what was predicted of steps."""
        self.watch = None

    def synchronize(self) -> None:
        """Wait until the workers have done everything they were told; raise what went wrong.

        Raises:
            Exception: Whatever a worker raised, with its own type.
            WorkerLostError: If a worker process died.
        """
        self.outbox.submit(Synchronize()).result()
        self.workers.drain()

    def restart_workers(self) -> WorkerGroup:
        """End the workers and start others, which know nothing yet; the outbox has to be told of them."""
        self.workers.close()
        self.workers = self._start_workers()
        return self.workers

    def close(self) -> None:
        """End the workers."""
        self.workers.close()
        self.job.close()

    # -- tensors that workers keep -----------------------------------------------------------------------------------

    def read_state(self, refs: tuple[StateRef, ...]) -> list[Tensor]:
        """Whole values of state tensors, on the CPU. Waits."""
        answers = zip(*self.outbox.submit(ReadState(refs)).result())  # one worker sends each tensor
        return [next(data for data in answer if data is not None).tensor() for answer in answers]

    def write_state(self, values: dict[StateRef, Tensor]) -> None:
        """Set whole values of state tensors; does not wait."""
        self.outbox.submit(WriteState({ref: TensorData.of(tensor) for ref, tensor in values.items()}))

    # -- the accelerator as a whole --------------------------------------------------------------------------------

    def devices(self) -> list[DeviceInfo]:
        """What stands behind the accelerator, a device each in rank order. Waits for the workers the first time."""
        if self._devices is None:
            self._devices = self.outbox.submit(DescribeDevice()).result()
        return self._devices

    def memory(self, *, reset_peak: bool = False, empty_cache: bool = False) -> dict[str, int]:
        """Bytes over all devices: ``allocated``, ``peak``, ``free``, ``total``. Waits."""
        reports = self.outbox.submit(ReportMemory(reset_peak=reset_peak, empty_cache=empty_cache)).result()
        return {name: sum(report[name] for report in reports) for name in ("allocated", "peak", "free", "total")}
