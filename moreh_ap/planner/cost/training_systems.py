"""Training systems: how the program that executes a plan does so, as far as memory and time depend on it.

Decides what distinguishes programs: in which precisions they keep state, what they shard beyond the plan, what they
fuse and what they overlap. Must not know architectures, devices, or what a plan costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moreh_ap.plan import Plan
from moreh_ap.planner.profiles.model_profile import ModelProfile

__all__ = ["EAGER_MEGATRON", "MOREH_AP", "MOREH_AP_ON_CPU", "PLAIN_MEGATRON", "TRAINING_SYSTEMS", "TUNED_FSDP",
           "TUNED_MEGATRON", "TrainingSystem"]  # fmt: skip


@dataclass(frozen=True)
class TrainingSystem:
    """One training program's way of executing plans.

    Attributes:
        name: How messages call it.
        weight_bytes: Bytes for each parameter of the copy in the computation's precision that is always there, 0.0
            where blocks are gathered from the master weights just in time.
        master_bytes: Bytes for each parameter of the weights that the optimizer changes.
        gradient_bytes: Bytes for each parameter in which gradients are summed over micro-batches.
        optimizer_bytes: Bytes for each parameter of the optimizer's state. Source: two float32 averages, Rajbhandari
            et al., "ZeRO", 2020, section 3.1.
        bucket_bytes: Bytes for each parameter of the buckets in which gradients are handed over, where devices share
            the batch.
        reduced_bytes: Bytes for each parameter in which gradients travel.
        accumulation_bytes: Bytes for each parameter that adding a micro-batch's gradients to their sums moves, where
            the product does not do it on the way.
        outer_unit_parameters: From how many parameters on a device on the layers before the blocks, and those after
            them, are gathered for their own use, as blocks are, instead of for the whole step; weights that the two
            share are not.
        trains_weights: Whether every weight gets a gradient; without, the backward of products takes half and there is
            neither gradient nor optimizer state (adapters such as LoRA, which are small).
        zero_stage: What is split over all devices that share the batch, beyond what the plan's `shard` splits:
            0 nothing, 1 master weights and optimizer, 2 gradients too, 3 weights too.
        gather_copies: Whether a sharded optimizer gathers the new weights into a copy of its own, and keeps what it
            sends as another: two more bytes for each parameter, and two for each of the device's part.
        gathers_blocks: Whether weights are gathered block by block for every use (FSDP2).
        regathers_for_backward: Whether a block's weights are given up after the forward and gathered again.
        keeps_gathered: Whether gathered weights stay for the whole step where that saves gathering again for every
            micro-batch of a pipeline, or where the plan does not shard.
        reduces_every_micro_batch: Whether sharded gradients are summed over the devices after every micro-batch; else
            they are kept whole until the last. Where weights stay gathered for the whole step of a pipeline
            (`keeps_gathered`), gradients stay whole too.
        sums_replicas_once: Whether the sums over replicas of a shard wait for the last micro-batch.
        logits_kept_bytes: Bytes for each logit that are kept from the forward of the loss to its backward.
        logits_peak_bytes: Bytes for each logit on top of that while the loss is computed.
        logits_left_bytes: Bytes for each logit of the micro-batch before that are still there then.
        logits_stay: Whether logits are results, which stay in the computation's precision, for every micro-batch, until
            the step ends.
        chunked_logits: From how many logits of a micro-batch on the loss takes them in chunks, without copies of them,
            where a token has at least `chunked_classes`: then there are, beside the results, the gradients of the
            logits in the computation's precision.
        chunked_classes: See `chunked_logits`.
        gradients_come: Whether a step begins without gradients, so that they come as activations go. Then the peak is
            found moment by moment: [Note: moments] in `peak_moment.py`.
        step_copy_bytes: Bytes for each of a device's parameters that the optimizer's step makes and drops. Source: the
            square roots of all second averages at once, `_multi_tensor_adam` in torch/optim/adam.py.
        norm_kept_bytes: Bytes for each value of the hidden state that a norm keeps beyond its input and its result,
            where it is computed operation by operation in float32.
        rotation_kept: Whether rotation keeps its inputs; multiplied by constants, it need not.
        selective_kept_bytes: Bytes for each value of the hidden state that selective recomputation keeps of a block
            beyond the profile: the result of its last product, which nothing asks for again.
        selective_again: Part of a block's forward that selective recomputation computes again.
        fused_attention: Whether attention keeps no scores.
        fused_elementwise: Part of the elementwise traffic and of its kernels that is left after fusing, 1.0 for none.
        kept_fraction: Part of the activations that is kept after fusing; 1.0 where every operation keeps its input.
        host_s_per_kernel: Seconds that the host needs to start one operation.
        host_s_per_exchange: Seconds that the host needs to start one exchange of the tensor axis.
        host_computes: Whether operations run on the processor that starts them, as on CPU workers.
        hides_tensor: Part of the tensor axis' communication that runs beside matrix products.
        hides_gradients: Part of the backward of the last micro-batch beside which gradients can travel.
        hides_scatters: The same where each device keeps a part of the sums only (`zero_stage` of at least 1).
        hides_gathers: Part of the computation beside which blocks can be gathered.
        hides_pipeline: Part of the pipeline's messages that runs beside computation.
        boundary_kept: Bytes for each value of the hidden state that a micro-batch in flight in a pipeline keeps whole
            on every device of the tensor axis, beside what its blocks keep.
        gathered_kept: Bytes for each value of the hidden state that a block keeps whole on every device of the tensor
            axis, where inputs that were gathered for products are not gathered again.
        partition: Which stage gets how many blocks where the plan does not say: "even"; "by_cost", where a stage takes
            blocks until it has its share of the parameters of blocks and head; or "past_cost", until it has more.
        matrix_precision: The precision of matrix products where it is not the plan's, such as "fp8".
    """

    name: str
    weight_bytes: float = 2.0
    master_bytes: float = 4.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    bucket_bytes: float = 0.0
    reduced_bytes: float = 4.0
    accumulation_bytes: float = 0.0
    outer_unit_parameters: float = math.inf
    trains_weights: bool = True
    zero_stage: int = 0
    gather_copies: bool = False
    gathers_blocks: bool = False
    regathers_for_backward: bool = True
    keeps_gathered: bool = False
    reduces_every_micro_batch: bool = True
    sums_replicas_once: bool = False
    logits_kept_bytes: float = 6.0
    logits_peak_bytes: float = 4.0
    logits_left_bytes: float = 0.0
    logits_stay: bool = False
    chunked_logits: float = math.inf
    chunked_classes: int = 0
    gradients_come: bool = False
    step_copy_bytes: float = 0.0
    norm_kept_bytes: float = 0.0
    rotation_kept: bool = True
    selective_kept_bytes: float = 0.0
    selective_again: float = 0.1
    fused_attention: bool = True
    fused_elementwise: float = 1.0
    kept_fraction: float = 1.0
    host_s_per_kernel: float = 9e-6
    host_s_per_exchange: float = 2e-5
    host_computes: bool = False
    hides_tensor: float = 0.0
    hides_gradients: float = 0.5
    hides_scatters: float = 0.5
    hides_gathers: float = 0.9
    hides_pipeline: float = 0.0
    boundary_kept: float = 0.0
    gathered_kept: float = 0.0
    partition: str = "even"
    matrix_precision: str = ""

    def keeps_whole_gradients(self, plan: Plan) -> bool:
        """Says whether every device has whole gradients of its blocks until the last micro-batch, beside its shard."""
        if plan.micro_batches == 1 or plan.shard == 1 or not self.gathers_blocks:
            return False
        return not self.reduces_every_micro_batch or (self.keeps_gathered and plan.pipeline > 1)

    def outer_units(self, plan: Plan, profile: ModelProfile) -> tuple[float, float]:
        """Returns the parameters on a device of the layers before and after the blocks that are units, 0.0 if not."""
        if not plan.gathers_in_turn or profile.tied:
            return 0.0, 0.0
        first, last = (one.parameters_on_device(plan.tensor) for one in (profile.first, profile.last))
        least = self.outer_unit_parameters
        return first if first >= least else 0.0, last if last >= least else 0.0

    def takes_logits_in_chunks(self, plan: Plan, classes: int, logits: float) -> bool:
        """Says whether a loss makes no copies of its logits.

        Args:
            plan: The plan; a tensor axis splits the vocabulary instead.
            classes: Logits of one token.
            logits: Logits of one micro-batch on one device.
        """
        return plan.tensor == 1 and classes >= self.chunked_classes and logits >= self.chunked_logits

    def with_zero_stage(self, zero_stage: int) -> TrainingSystem:
        """Returns the same system with another sharding over the devices that share the batch."""
        return replace(self, zero_stage=zero_stage)


MOREH_AP = TrainingSystem(
    name="moreh_ap",
    weight_bytes=0.0,
    gathers_blocks=True,
    keeps_gathered=True,
    outer_unit_parameters=2.0**24,
    sums_replicas_once=True,
    reduced_bytes=4.0,
    accumulation_bytes=10.0,
    logits_kept_bytes=4.0,
    logits_peak_bytes=8.0,
    logits_stay=True,
    chunked_logits=2.0**25,
    chunked_classes=2**13,
    gradients_come=True,
    step_copy_bytes=4.0,
    norm_kept_bytes=4.0,
    rotation_kept=False,
    selective_kept_bytes=2.0,
    gathered_kept=4.0,
    hides_pipeline=0.5,
)
"""This package's runtime: float32 master weights, FSDP2 where the plan shards or computes in bfloat16."""

MOREH_AP_ON_CPU = replace(
    MOREH_AP, host_computes=True, hides_gradients=0.0, hides_gathers=0.0, hides_pipeline=0.0, chunked_logits=2.0**22
)
"""The same on CPU workers. What carries messages are the cores that compute, so nothing is hidden."""

EAGER_MEGATRON = TrainingSystem(
    name="eager_megatron",
    bucket_bytes=2.0,
    gather_copies=True,
    accumulation_bytes=10.0,
    reduced_bytes=4.0,
    host_s_per_kernel=4.18e-05,
    host_s_per_exchange=9.3e-05,
    hides_tensor=0.0916,
    logits_left_bytes=4.0,
    boundary_kept=11.0,
    partition="by_cost",
    hides_gradients=0.61,
    hides_scatters=0.203,
)
"""16-bit weights, float32 gradient sums and master weights, one kernel an operation. Source: nanotron."""

TUNED_MEGATRON = TrainingSystem(
    name="tuned_megatron",
    zero_stage=1,
    reduced_bytes=2.0,
    fused_elementwise=0.5,
    kept_fraction=0.75,
    host_s_per_kernel=4e-6,
    hides_tensor=0.5,
    hides_gradients=0.9,
    hides_scatters=0.9,
    hides_pipeline=0.7,
)
"""The same with fused kernels and communication beside the computation. Source: Megatron-LM, NeMo."""

PLAIN_MEGATRON = replace(
    TUNED_MEGATRON,
    name="plain_megatron",
    fused_attention=False,
    zero_stage=0,
    host_s_per_kernel=1e-5,
    hides_tensor=0.0,
    hides_gradients=0.0,
    hides_pipeline=0.0,
)
"""As before fused attention, nothing hidden. Source: Narayanan et al., 2021, section 4."""

TUNED_FSDP = TrainingSystem(
    name="tuned_fsdp",
    accumulation_bytes=10.0,
    weight_bytes=0.0,
    gathers_blocks=True,
    reduced_bytes=2.0,
    gradient_bytes=4.0,
    fused_elementwise=0.5,
    kept_fraction=0.75,
    host_s_per_kernel=5e-6,
    hides_tensor=0.5,
    hides_gradients=0.9,
    hides_scatters=0.9,
    hides_pipeline=0.7,
)
"""FSDP with compiled blocks. Source: torchtitan, llm-foundry, PyTorch FSDP."""

TRAINING_SYSTEMS = {one.name: one for one in (MOREH_AP, EAGER_MEGATRON, TUNED_MEGATRON, PLAIN_MEGATRON, TUNED_FSDP)}
"""Training systems by name."""
