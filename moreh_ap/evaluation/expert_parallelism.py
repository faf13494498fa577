"""Memory and time that expert parallelism adds: each block's experts are distributed over data-parallel devices.

Decides the bytes of experts' state beyond those in the profile of one device's experts, and the seconds of sending
tokens to their experts and back. No plan of ours has such an axis: it is there for tables of other programs' runs
(`run_table.py`). Must not know how runs are read.

[Note: expert parallelism]
With experts distributed over `e` devices, a device computes with 1/e of them, for tokens of all `e`: its profile has
that part (`FeedForwardCost.spread`). State that is split over all `d` data-parallel devices is split over d/e for
experts, so each holds as much of it as without the axis. In forward and backward, tokens go to the devices of their
experts and come back. A token goes to each device once, even if several of its experts are there; with `k` experts
chosen evenly these are e (1 - (1 - 1/e)^k) devices. Source: https://github.com/deepseek-ai/DeepEP, which programs of
such runs use.
"""

from __future__ import annotations

from dataclasses import dataclass

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import Cluster
from moreh_ap.planner.cost.training_systems import TrainingSystem
from moreh_ap.planner.profiles.model_profile import BYTES_PER_VALUE, ModelProfile
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of

__all__ = ["ExpertAxis", "all_to_all_s", "axis_of", "state_bytes"]


@dataclass(frozen=True)
class ExpertAxis:
    """Experts distributed over devices.

    Attributes:
        degree: Devices over which the experts of a block are distributed, those of the tensor axis among them.
        layers: Layers that have experts.
        width: Length of what a token sends to its experts.
        taken: Experts that a token goes to.
        parameters_elsewhere: Parameter elements of the whole model's experts that a device does not hold.
    """

    degree: int
    layers: float
    width: int
    taken: int
    parameters_elsewhere: float

    @property
    def devices_per_token(self) -> float:
        """Devices, its own among them, to which a token goes. See [Note: expert parallelism]."""
        return self.degree * (1.0 - (1.0 - 1.0 / self.degree) ** self.taken)


def axis_of(shape: TransformerShape, degree: int, spread: int) -> ExpertAxis | None:
    """Returns how the experts of a model are distributed over `degree` devices; None where each device has all of them.

    Args:
        shape: The model.
        degree: All devices.
        spread: Those beyond the tensor axis.
    """
    if degree == 1:
        return None
    layers = shape.kinds.count("E") if shape.kinds else shape.num_layers - shape.dense_layers
    elsewhere = profile_of(shape, 1).parameters - profile_of(shape, 1, expert_spread=spread).parameters
    return ExpertAxis(degree, layers, shape.latent_hidden or shape.hidden, shape.experts_per_token, elsewhere)


def state_bytes(axis: ExpertAxis, plan: Plan, system: TrainingSystem) -> float:
    """Returns the bytes of state that a device holds beyond those of its profile. See [Note: expert parallelism]."""
    kinds = ((1, system.master_bytes + system.optimizer_bytes), (2, system.gradient_bytes))
    split = sum(each for stage, each in (*kinds, (3, system.weight_bytes)) if system.zero_stage >= stage)
    if plan.shard > 1:
        split = system.master_bytes + system.optimizer_bytes + system.gradient_bytes + system.weight_bytes
    held = axis.parameters_elsewhere / plan.tensor / plan.pipeline
    return split * held / (plan.shard if plan.shard > 1 else plan.data_parallel)


def all_to_all_s(
    axis: ExpertAxis, profile: ModelProfile, plan: Plan, rows: int, cluster: Cluster, system: TrainingSystem
) -> float:
    """Returns the seconds of a step in which tokens travel and nothing is computed meanwhile.

    Args:
        axis: How experts are distributed.
        profile: The model.
        plan: How the rest of it is spread.
        rows: Rows of a micro-batch.
        cluster: The devices.
        system: What the program hides behind computation, as much as of the tensor axis' communication.
    """
    tokens = rows * profile.sequence_length / (plan.tensor if plan.sequence_parallel else 1)
    near = min(axis.degree, cluster.devices_per_node)
    sent = tokens * axis.devices_per_token * axis.width * BYTES_PER_VALUE
    inside_s = cluster.intra.latency_s + sent * (near - 1) / axis.degree / cluster.intra.bytes_per_s
    outside_s = 0.0
    if axis.degree > near:
        own_bytes_per_s = cluster.inter.bytes_per_s / cluster.devices_per_node
        outside_s = cluster.inter.latency_s + sent * (1.0 - near / axis.degree) / own_bytes_per_s
    passes = 6.0 if plan.recompute == "full" else 4.0
    once_s = passes * max(inside_s, outside_s) * axis.layers / plan.pipeline * (1.0 - system.hides_tensor)
    return once_s * (plan.micro_batches + (plan.pipeline - 1) / plan.stages_per_device)
