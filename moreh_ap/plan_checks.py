"""The values that a plan may have, and the error for each that it may not.

Decides which values and combinations are possible, and names in the error what would work. Must not know how a plan is
written or used; `moreh_ap.plan` asks it once for every plan that is made.

[Note: numbers of micro-batches]
1F1B keeps as many micro-batches in flight as there are stages, so it needs at least that many. Interleaved 1F1B and the
zero-bubble schedule work in rounds: with P devices in the pipeline and M micro-batches there are max(1, M // P) rounds,
and M must be a multiple of their number. GPipe takes any number. A batch at run time may have fewer rows than that.
Source: torch/distributed/pipelining/schedules.py, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble.
"""

from __future__ import annotations

from typing import NamedTuple

from moreh_ap.errors import PlanError

PRECISIONS = ("fp32", "bf16")
"""`fp32`: everything in float32. `bf16`: compute in bfloat16; weights, gradient sums and optimizer in float32."""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
"""`gpipe`: all forwards, then all backwards. `1f1b`: one forward, one backward. `interleaved`: 1F1B with several stages
on every device. `zero_bubble`: the gradients of weights fill the waiting times of 1F1B."""

RECOMPUTE_KINDS = ("none", "selective", "full")
"""`selective` keeps matrix products and attention results, `full` keeps nothing but the input of each block."""

OFFLOADS = ("none", "optimizer", "all")
"""`optimizer`: the state of the optimizer lies in host memory between steps. `all`: parameters, gradients and state do,
the optimizer steps there, and the parameters of a block come to the device for its computation."""

COMPILES = ("none", "blocks")
"""`blocks`: the forward and backward of each repeated block are compiled by `torch.compile`."""

WORDS = {"schedule": SCHEDULES, "precision": PRECISIONS, "offload": OFFLOADS, "compile": COMPILES}
"""The fields of a plan that are a word, with the words."""

_PIPELINE_EXAMPLES = {
    "schedule": "schedule=gpipe",
    "stages_per_device": "schedule=interleaved,stages_per_device=2",
    "layers": "layers=3+5",
}


class PipelineFields(NamedTuple):
    """The fields of a plan that describe its pipeline; names and values as in `Plan`."""

    pipeline: int
    schedule: str
    stages_per_device: int
    micro_batches: int
    layers: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.pipeline * self.stages_per_device


def check_word(name: str, word: object) -> None:
    """Raises PlanError if `word` is none of the words of the field `name`."""
    allowed = WORDS[name]
    if word not in allowed:
        example = "pipeline=2,schedule=1f1b" if name == "schedule" else f"{name}={allowed[-1]}"
        raise PlanError(f"plan: {name}={word!r} is unknown", " or ".join(allowed), f'plan="{example}"')


def check_size(name: str, size: object) -> None:
    """Raises PlanError if `size` is no integer of at least 1."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        example = f"pipeline=2,{_PIPELINE_EXAMPLES[name]}" if name in _PIPELINE_EXAMPLES else f"{name}=2"
        raise PlanError(f"plan: {name}={size!r} is no size", "an integer of at least 1", f'plan="{example}"')


def check_recompute(recompute: object) -> None:
    """Raises PlanError if `recompute` is neither a kind of recomputation nor a number of blocks."""
    is_count = isinstance(recompute, int) and not isinstance(recompute, bool) and recompute >= 1
    if not is_count and recompute not in RECOMPUTE_KINDS:
        raise PlanError(
            f"plan: recompute={recompute!r} is unknown",
            f"{', '.join(RECOMPUTE_KINDS)} or a number of blocks of at least 1",
            'plan="recompute=full"',
        )


def check_sequence_parallel(sequence_parallel: object, tensor: int) -> None:
    """Raises PlanError if `sequence_parallel` is no truth value, or true where `tensor` is 1."""
    if not isinstance(sequence_parallel, bool):
        raise PlanError(
            f"plan: sequence_parallel={sequence_parallel!r} is unknown",
            "true or false",
            'plan="tensor=2,sequence_parallel=true"',
        )
    if sequence_parallel and tensor == 1:
        raise PlanError(
            "plan: sequence_parallel=true with tensor=1: there is no other device to split the sequence with",
            "sequence_parallel=false, or tensor of at least 2",
            'plan="tensor=2,sequence_parallel=true"',
        )


def check_compile(compile: str, tensor: int, schedule: str) -> None:
    """Raises PlanError if blocks are to be compiled where they cannot be."""
    reason = why_uncompiled(tensor, schedule) if compile == "blocks" else ""
    if reason:
        raise PlanError(
            f"plan: compile=blocks cannot be: {reason}",
            "compile=blocks with replicate, shard, micro-batches, recomputation and other pipelines",
            'plan="shard=2,compile=blocks"',
        )


def why_uncompiled(tensor: int, schedule: str) -> str:
    """Returns why blocks cannot be compiled with such a tensor axis and schedule, as the end of a sentence, or ""."""
    if tensor > 1:
        return f"tensor={tensor} has devices exchange activations inside a block"
    if schedule == "zero_bubble":
        return "schedule=zero_bubble computes gradients of inputs and of weights apart, and compiled code together"
    return ""


def check_offload(offload: str, tensor: int, pipeline: int) -> None:
    """Raises PlanError if parameters are to be in host memory where each use would not find them on the device."""
    if offload == "all" and tensor * pipeline > 1:
        axis = f"tensor={tensor}" if tensor > 1 else f"pipeline={pipeline}"
        reason = (
            "a stage keeps its parameters gathered for all micro-batches"
            if pipeline > 1
            else "parameters that a tensor axis splits stay on their device"
        )
        raise PlanError(
            f"plan: offload=all with {axis}: {reason}",
            "offload=all with replicate, shard, micro-batches and recomputation; offload=optimizer with every axis",
            f'plan="shard={tensor * pipeline},offload=all"',
        )


def check_layers(layers: object) -> None:
    """Raises PlanError if `layers` is not numbers of blocks; whether there is one a stage is `check_pipeline`'s."""
    if not isinstance(layers, tuple):
        raise PlanError(f"plan: layers={layers!r} is no tuple", "a tuple of integers", 'plan="pipeline=2,layers=3+5"')
    for count in layers:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise PlanError(
                f"plan: layers={spell(layers)}: {count!r} is no number of blocks",
                "integers of at least 1, one for each stage",
                'plan="pipeline=2,layers=3+5"',
            )


def check_pipeline(plan: PipelineFields) -> None:
    """Raises PlanError where fields that describe a pipeline contradict each other."""
    if plan.pipeline == 1:
        _check_no_pipeline(plan)
        return
    if plan.schedule == "interleaved" and plan.stages_per_device == 1:
        raise PlanError(
            "plan: schedule=interleaved with stages_per_device=1: there is nothing to interleave",
            "stages_per_device of at least 2, or schedule=1f1b",
            f'plan="pipeline={plan.pipeline},schedule=interleaved,stages_per_device=2"',
        )
    if plan.schedule in ("gpipe", "1f1b") and plan.stages_per_device > 1:
        raise PlanError(
            f"plan: stages_per_device={plan.stages_per_device} with schedule={plan.schedule}, which has one",
            "stages_per_device=1, or schedule=interleaved or zero_bubble",
            f'plan="pipeline={plan.pipeline},schedule=interleaved,stages_per_device={plan.stages_per_device}"',
        )
    if plan.layers and len(plan.layers) != plan.num_stages:
        raise PlanError(
            f"plan: layers={spell(plan.layers)}, but pipeline x stages_per_device = {plan.pipeline} x "
            f"{plan.stages_per_device} = {plan.num_stages} stages",
            f"{plan.num_stages} numbers, one for each stage",
            f'plan="pipeline={plan.num_stages},layers={spell((4,) * plan.num_stages)}"',
        )
    _check_micro_batches(plan)


def spell(value: object) -> str:
    """Returns `value` as a plan's text has it."""
    if isinstance(value, tuple):
        return "+".join(str(count) for count in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_no_pipeline(plan: PipelineFields) -> None:
    """Raises PlanError if a plan without a pipeline says something about one."""
    for name, absent in (("schedule", "1f1b"), ("stages_per_device", 1), ("layers", ())):
        value = getattr(plan, name)
        if value != absent:
            raise PlanError(
                f"plan: {name}={spell(value)} with pipeline=1: there is no pipeline",
                f"{name} left out, or pipeline of at least 2",
                f'plan="pipeline=2,{_PIPELINE_EXAMPLES[name]}"',
            )


def _check_micro_batches(plan: PipelineFields) -> None:
    """Raises PlanError if the schedule cannot run this many micro-batches. See [Note: numbers of micro-batches]."""
    count = plan.micro_batches
    if _runs(plan, count):
        return
    below = next((fewer for fewer in range(count - 1, 0, -1) if _runs(plan, fewer)), None)
    above = next(more for more in range(count + 1, count + plan.num_stages + 1) if _runs(plan, more))
    numbers = f"{above} or more" if below is None else f"{below} or {above}"
    raise PlanError(
        f"plan: schedule={plan.schedule} cannot run micro_batches={count} with pipeline={plan.pipeline}",
        f"micro_batches={numbers}, or schedule=gpipe with one stage a device",
        f'plan="pipeline={plan.pipeline},micro_batches={above},schedule={plan.schedule}"',
    )


def _runs(plan: PipelineFields, micro_batches: int) -> bool:
    if plan.schedule == "gpipe":
        return True
    if plan.schedule == "1f1b":
        return micro_batches >= plan.num_stages
    return micro_batches % max(1, micro_batches // plan.pipeline) == 0
