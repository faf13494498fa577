"""The controller's side of one accelerator: its workers, its random stream, and the tensors that workers keep.

A session is made by the one line and lives until the process ends. It must not know how a model is called or stepped:
that is `model`, `call` and `optimizer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from moreh_ap.local.jobs import Job
from moreh_ap.plan import Plan
from moreh_ap.protocol.messages.devices import DescribeDevice, DeviceInfo, ReportMemory
from moreh_ap.protocol.messages.state import ReadState, WriteState
from moreh_ap.protocol.messages.stream import Synchronize
from moreh_ap.protocol.messages.tensors import StateRef, TensorData
from moreh_ap.runtime.recovery.past import Past
from moreh_ap.runtime.recovery.recovering_group import RecoveringWorkerGroup
from moreh_ap.runtime.relay.carrier import Ask
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.calls.call_extensions import CallExtensions
from moreh_ap.session.calls.lone_losses import LoneLosses
from moreh_ap.session.outbox import Outbox
from moreh_ap.session.rng_streams import AcceleratorGenerator
from moreh_ap.session.traffic import Traffic
from moreh_ap.session.value_memory import ReadAhead, ValueMemory
from moreh_ap.settings import Options
from moreh_ap.states import SessionState

if TYPE_CHECKING:
    from moreh_ap.runtime.host.host_pool import HostPool


class StepObserver(Protocol):
    """Called for every optimizer step: one that is sent, and one that runs in the script's own process."""

    def stepped(self, optimizer: Optimizer) -> None: ...

    def stepped_here(self, optimizer: Optimizer) -> None: ...


class PlanObserver(Protocol):
    """Called with the plan of each model, as `plan_selection.Planned`, and why the model has it."""

    def planned(self, root: Any, planned: Any, reason: str) -> None: ...


class ResumeObserver(Protocol):
    """Called when an automatic checkpoint was loaded."""

    def resumed(self, steps: int, restore: Callable[[], None]) -> None: ...


class StepCheck(Protocol):
    """Called with the parameters before and after every optimizer step that is sent, and before they are clipped."""

    def before_change(self, parameters: Iterable[Tensor]) -> None: ...

    def after_step(self, parameters: Iterable[Tensor]) -> None: ...

    def close(self) -> None: ...


StartWorkers = Callable[[int, Past | None], WorkerGroup]
"""Starts so many workers, which first execute commands of workers that have ended."""


class Session:
    """Owns the workers and the order of their commands.

    Args:
        options: The script's options.
        start_workers: Starts so many worker processes and returns at once; they first execute commands of earlier ones.
        max_devices: Devices of the accelerator.
        num_devices: Those of them that have a worker at first.
        job: The entry by which other programs see this process and its workers.
        generator: The source of random numbers of remote forwards.
        pool: The hosts, None where the devices are this machine's.

    Attributes:
        max_devices: Devices of the accelerator.
        num_devices: Those of them that have a worker.
    """

    def __init__(
        self,
        options: Options,
        start_workers: StartWorkers,
        max_devices: int,
        num_devices: int,
        job: Job,
        generator: AcceleratorGenerator,
        pool: HostPool | None = None,
    ) -> None:
        self.options, self._start_workers, self.job, self.pool = options, start_workers, job, pool
        self.max_devices, self.num_devices = max_devices, num_devices
        self.workers = start_workers(num_devices, None)
        self.workers.before_end = self._before_end
        self.device_type = self.workers.device_type
        self.generator = generator
        self.outbox = Outbox(self.workers, leaves_at_once=self.device_type == "cuda")
        self.reader = ReadAhead(self.outbox, self.read_state)
        self.traffic = Traffic()
        self.lone_losses = LoneLosses(self)
        self.watch: StepObserver | None = None
        self.check: StepCheck | None = None
        self.report: PlanObserver | None = None
        self.autosave: ResumeObserver | None = None
        self.trial_plan: Plan | None = None  # see `trying`
        self._devices: list[DeviceInfo] | None = None
        self._keeps_commands = False
        self.extensions: CallExtensions  # set by `session_backend`
        self.lay_out_again: Callable[[Any, Plan, str], bool] | None = None  # see `recovery`
        self.use_all_devices: Callable[[str], bool] | None = None  # see `recovery`
        self.before_end: Callable[[BaseException, Ask], object] | None = None  # see `recovery`
        self.runs_after_answer = False  # whether a model's outputs are promised before they are computed
        self.has_differentiated = False  # whether a backward had a graph, for which workers need the whole model
        self.script_only_hooks: set[int] = set()  # see `script_hooks.RunsInScriptOnly`
        self.has_told_of_global_hooks = False
        self.has_ended = False  # whether the workers have stopped, no others take over, and the script was told

    @property
    def hosts(self) -> Sequence[str]:
        """The hosts that are used, as they were given; none: the devices are this machine's."""
        return () if self.pool is None else self.pool.hosts

    @property
    def uses_fewer_devices(self) -> bool:
        """Whether some devices of the accelerator have no worker."""
        return self.num_devices < self.max_devices

    @contextlib.contextmanager
    def trying(self, plan: Plan) -> Iterator[None]:
        """Inside, models at their first call use `plan`, unverified and without a line in the log."""
        before, self.trial_plan = self.trial_plan, plan
        try:
            yield
        finally:
            self.trial_plan = before

    def stop_watching(self) -> None:
        """Notifies no observer of further steps."""
        self.watch = None

    def synchronize(self) -> None:
        """Waits until the workers have run all commands; raises the error of any.

        Raises:
            Exception: A worker raised it; its type is kept.
            WorkerLostError: A worker process died.
        """
        self.outbox.submit(Synchronize()).result()
        self.workers.drain()

    def keep_commands(self) -> None:
        """Has commands kept from now on, if others are to take over from lost workers; these have nothing as yet."""
        self._keeps_commands = True
        self.workers.keep_commands()
        if self.workers.keeps_commands:
            self.outbox.has_stale_definitions = True  # those of before are not among them

    def forget_commands(self, why: str) -> None:
        """Has no commands kept from now on, of these workers or others: one that is lost ends the run."""
        self._keeps_commands = False
        if isinstance(self.workers, RecoveringWorkerGroup):
            self.workers.forget_commands(why)

    def when_not_sent_again(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once nothing that was sent until now can be sent again, to these workers or to others."""
        self.outbox.state.when_left(SessionState.REPLAYABLE, lambda: self.workers.when_forgotten(callback))

    def restart_workers(self, num_devices: int | None = None, past: Past | None = None) -> WorkerGroup:
        """Ends the workers and starts others without any state; the caller passes them to the outbox.

        Args:
            num_devices: How many are started; None: as many as before.
            past: Commands of workers that have ended, which the others execute first; None: none.
        """
        if past is None:
            self.workers.close()
        self.num_devices = num_devices or self.num_devices
        known = None if past is None else self._devices  # devices that join, or are left, are like those before
        self._devices = known and [known[rank % len(known)] for rank in range(self.num_devices)]
        self.workers = self._start_workers(self.num_devices, past)
        self.workers.before_end = self._before_end
        if self._keeps_commands:
            self.workers.keep_commands()
        return self.workers

    def _before_end(self, error: BaseException, ask: Ask) -> None:
        if self.before_end is not None:
            self.before_end(error, ask)

    def close(self) -> None:
        """Ends the workers."""
        if self.check is not None:
            self.check.close()
        self.workers.close()
        self.job.close()

    # -- state tensors on the workers
    # -----------------------------------------------------------------------------------

    def read_state(self, refs: tuple[StateRef, ...]) -> list[Tensor]:
        """Returns the full values of state tensors, on the CPU. Waits."""
        with contextlib.closing(ValueMemory(self.workers.num_workers, self.workers.shares_memory)) as memory:
            answers = zip(*self.outbox.submit(ReadState(refs, memory.file)).result())  # one worker sends each tensor
            return [memory.tensor(next(data for data in answer if data is not None)) for answer in answers]

    def write_state(self, values: dict[StateRef, Tensor]) -> None:
        """Sets state tensors from full values; does not wait."""
        self.outbox.submit(WriteState({ref: TensorData.of(tensor) for ref, tensor in values.items()}))

    # -- the accelerator --------------------------------------------------------------------------------

    @property
    def knows_devices(self) -> bool:
        """Whether `devices` does not wait."""
        return self._devices is not None

    def devices(self) -> list[DeviceInfo]:
        """Returns the devices of the accelerator, in rank order. Waits for the workers the first time."""
        if self._devices is None:
            self._devices = list(self.outbox.submit(DescribeDevice()).result())
        return self._devices

    def memory(self, *, reset_peak: bool = False) -> dict[str, int]:
        """Returns bytes summed over all devices: ``allocated``, ``peak``, ``free``, ``total``. Waits."""
        reports = self.outbox.submit(ReportMemory(reset_peak=reset_peak)).result()
        return {name: sum(report[name] for report in reports) for name in ("allocated", "peak", "free", "total")}
