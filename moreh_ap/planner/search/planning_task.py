"""What the planner is asked: a model, devices, a batch, and what the user's options leave.

Decides how many bytes a plan may reserve, and with which constants bytes and seconds are estimated. Must not know which
plans are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import COEFFICIENTS, Coefficients
from moreh_ap.planner.cost.hardware import Cluster
from moreh_ap.planner.cost.memory_footprint import MemoryEstimate, estimate_memory
from moreh_ap.planner.cost.step_estimate import StepEstimate
from moreh_ap.planner.cost.step_time import estimate_step
from moreh_ap.planner.cost.training_systems import MOREH_AP, TrainingSystem
from moreh_ap.planner.profiles.model_profile import ModelProfile
from moreh_ap.planner.search.constraints import Constraints

__all__ = ["UNCORRECTED", "Corrections", "Task"]


@dataclass(frozen=True)
class Corrections:
    """Measured over predicted, as earlier runs on a machine found it; 1.0 where nothing was learned.

    Attributes:
        time: Factor of the seconds of a step.
        memory: Factor of the bytes of a device.
    """

    time: float = 1.0
    memory: float = 1.0


UNCORRECTED = Corrections()

HOST_MEMORY = 2.0
"""Host memory of a machine that is not known, in the memory of its devices. An assumption, on the careful side: eight
H100 of a DGX have 640 GB, and their host 2 TB."""


@dataclass(frozen=True)
class Task:
    """One question to the planner: a model, devices, a batch and the constraints.

    Attributes:
        profile: The model.
        cluster: The devices.
        global_batch: Rows of a step.
        constraints: What the user's options leave.
        system: How the program that executes the plan keeps state.
        coefficients: Constants of the estimates.
        corrections: What was learned of the estimates on this machine.
    """

    profile: ModelProfile
    cluster: Cluster
    global_batch: int
    constraints: Constraints = field(default_factory=Constraints)
    system: TrainingSystem = MOREH_AP
    coefficients: Coefficients = COEFFICIENTS
    corrections: Corrections = UNCORRECTED

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device that a plan may reserve."""
        ratio = self.constraints.memory_usage_correction_ratio
        device = self.cluster.device
        return device.usable_bytes if ratio is None else device.memory_bytes * ratio / 100

    @property
    def usable_host_bytes(self) -> float:
        """Bytes of host memory that a plan with `offload=all` may take for each device. See `HOST_MEMORY`."""
        known = self.constraints.host_bytes
        return HOST_MEMORY * self.cluster.device.memory_bytes if known is None else known

    @property
    def precision(self) -> str:
        """The precision of every plan."""
        return "bf16" if self.constraints.mixed_precision and self.cluster.device.native_bf16 else "fp32"

    def with_usable(self, num_bytes: float) -> Task:
        """Returns the same task for devices of which a plan may reserve at most `num_bytes`."""
        device = self.cluster.device
        smaller = replace(device, memory_bytes=device.memory_bytes * min(1.0, num_bytes / self.usable_bytes))
        return replace(self, cluster=replace(self.cluster, device=smaller))

    def memory_of(self, plan: Plan) -> MemoryEstimate:
        """Returns the bytes that the fullest device holds under a plan."""
        estimate = estimate_memory(self.profile, plan, self.global_batch, self.system, self.coefficients)
        return estimate if self.corrections.memory == 1.0 else estimate.scaled(self.corrections.memory)

    def step_of(self, plan: Plan) -> StepEstimate:
        """Returns the seconds that a step takes under a plan."""
        estimate = estimate_step(self.profile, plan, self.global_batch, self.cluster, self.system, self.coefficients)
        return estimate if self.corrections.time == 1.0 else estimate.scaled(self.corrections.time)
