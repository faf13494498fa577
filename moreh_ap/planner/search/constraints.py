"""What the user's options leave of all plans.

Decides which restrictions there are and what they may say. Must not know which plans are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moreh_ap.errors import OptionError, PlanError
from moreh_ap.plan import Plan
from moreh_ap.settings import Options

__all__ = ["ALL_KINDS", "Constraints", "for_packed_weights"]

ALL_KINDS = frozenset({"tensor", "sequence_parallel", "pipeline"})
"""The kinds of parallelism that are exact only for models whose structure was understood (`verified_kinds.py`)."""


@dataclass(frozen=True)
class Constraints:
    """The limits that the user's options set to the search space.

    Attributes:
        pipeline_parallel: Whether a pipeline may be used.
        num_stages: Largest number of pipeline stages.
        num_micro_batches: Number of micro-batches.
        activation_recomputation: True: every block computes again, "selective" or "full"; False: none does.
        distribute_parameter: True: devices that share the batch split the parameters; False: none do.
        mixed_precision: Whether bfloat16 may be computed in, where devices do so in hardware.
        memory_usage_correction_ratio: Per cent of a device's memory that a plan may reserve; None leaves to the device
            what a process can have of it.
        kinds: Kinds of parallelism that may be used, of `ALL_KINDS`.
        tensor_degrees: Sizes that the tensor axis may have; None: those that divide every product that it splits.
        offload: Whether state, and parameters with it, may go to host memory if nothing fits otherwise.
        host_bytes: Bytes of host memory that `offload=all` may take for each device; None: not known.
        compiles_blocks: Whether blocks are compiled where they can be: the script asks for it.
    """

    pipeline_parallel: bool = True
    num_stages: int | Literal["auto"] = "auto"
    num_micro_batches: int | Literal["auto"] = "auto"
    activation_recomputation: bool | Literal["auto"] = "auto"
    distribute_parameter: bool | Literal["auto"] = "auto"
    mixed_precision: bool = True
    memory_usage_correction_ratio: int | None = None
    kinds: frozenset[str] = ALL_KINDS
    tensor_degrees: tuple[int, ...] | None = None
    offload: bool = True
    host_bytes: float | None = None
    compiles_blocks: bool = False

    @classmethod
    def from_options(
        cls, options: Options, kinds: frozenset[str] = ALL_KINDS, tensor_degrees: tuple[int, ...] | None = None
    ) -> Constraints:
        """Returns what the one line's options leave of the space."""
        return cls(
            pipeline_parallel=options.pipeline_parallel,
            num_stages=options.num_stages,
            num_micro_batches=options.num_micro_batches,
            activation_recomputation=options.activation_recomputation,
            distribute_parameter=options.distribute_parameter,
            mixed_precision=options.mixed_precision,
            memory_usage_correction_ratio=options.memory_usage_correction_ratio,
            kinds=kinds,
            tensor_degrees=tensor_degrees,
        )

    def __post_init__(self) -> None:
        unknown = sorted(self.kinds - ALL_KINDS)
        if unknown:
            raise OptionError(f"kinds: {', '.join(unknown)} unknown", ", ".join(sorted(ALL_KINDS)), "--kinds tensor")
        ratio = self.memory_usage_correction_ratio
        if ratio is not None and not 1 <= ratio <= 100:
            raise OptionError(f"memory_usage_correction_ratio={ratio}", "an integer from 1 to 100")
        for name in ("num_stages", "num_micro_batches"):
            value = getattr(self, name)
            if value != "auto" and value < 1:
                raise OptionError(f"{name}={value}", "an integer of at least 1, or 'auto'")


def for_packed_weights(constraints: Constraints, given: Plan | None) -> Constraints:
    """Returns what is left for a model with packed weights: replicas and shards, its own precisions.

    Raises:
        PlanError: Another plan is given.
    """
    if given is not None and (given.tensor > 1 or given.pipeline > 1 or given.precision != "fp32"):
        what = "a tensor axis or a pipeline" if given.tensor * given.pipeline > 1 else "precision=bf16"
        raise PlanError(
            f"plan={str(given)!r} has {what}, and weights of 4 bits stay as their library has packed them",
            "replicate and shard, with micro_batches, recompute and offload; bfloat16 by bnb_4bit_compute_dtype",
            f'torch.moreh.option.enable_advanced_parallelization(plan="shard={given.num_devices}")',
        )
    return replace(constraints, pipeline_parallel=False, tensor_degrees=(1,), mixed_precision=False)


def with_parameters_in_place(constraints: Constraints) -> Constraints:
    """Returns what is left for a model in which nothing can take the place of a parameter: replicas in float32."""
    shards = constraints.distribute_parameter is True  # the script asks for them, and the workers say why not
    left = replace(constraints, distribute_parameter=shards, offload=False)
    return replace(left, pipeline_parallel=False, tensor_degrees=(1,), mixed_precision=False)
