"""The vocabulary of parallel plans: a small frozen object that prints as one line and parses back.

Decides which plans exist and how they are written. Planner, session, parallelizer, logs and documentation all speak
of plans through this module. Must not know models, devices, memory, processes or torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from moreh_ap.errors import PlanError
from moreh_ap.plan_checks import (
    COMPILES,
    OFFLOADS,
    PRECISIONS,
    RECOMPUTE_KINDS,
    SCHEDULES,
    WORDS,
    PipelineFields,
    check_compile,
    check_layers,
    check_offload,
    check_pipeline,
    check_recompute,
    check_sequence_parallel,
    check_size,
    check_word,
    spell,
    why_uncompiled,
)

__all__ = ["COMPILES", "OFFLOADS", "PRECISIONS", "RECOMPUTE_KINDS", "SCHEDULES", "Plan"]

_SIZES = ("replicate", "shard", "tensor", "pipeline", "micro_batches", "stages_per_device")
_LATER_AXES = ("context", "expert")
_EXAMPLE = 'plan="replicate=2,shard=2,micro_batches=4,precision=bf16"'
_UNSET = cast(int, None)


@dataclass(frozen=True)
class Plan:
    """How one model is spread over the devices of one accelerator.

    Attributes:
        replicate: Number of groups that hold the whole model and share the global batch (data parallel).
        shard: Number of devices in a group that split parameters, gradients and optimizer state (FSDP2). They share
            the batch too. With `replicate` and `shard` both above 1 the plan is hybrid.
        tensor: Number of devices that split every matrix product, heads, hidden units and vocabulary among them.
        sequence_parallel: Whether those devices split the positions of a sequence between the products.
        pipeline: Number of devices that hold one part of the blocks each, one after another.
        micro_batches: Number of pieces in which a device works through its slice of the batch, one after another.
            Left out it is 1 without a pipeline and `num_stages` with one.
        schedule: The order of a pipeline's forwards and backwards, one of `SCHEDULES`.
        stages_per_device: Number of stages that a device of the pipeline holds. Left out it is 2 for the interleaved
            schedule and 1 otherwise.
        layers: Number of blocks of every stage, in order of stages; empty: as evenly as possible.
        recompute: What of the activations is computed again in the backward: one of `RECOMPUTE_KINDS`, or the number
            of blocks of each stage that are computed again in full.
        precision: One of `PRECISIONS`.
        offload: One of `OFFLOADS`.
        compile: One of `COMPILES`.

    Raises:
        PlanError: A value is impossible, or two values contradict each other.

    Example:
        >>> plan = Plan(replicate=2, shard=2, precision="bf16")
        >>> str(plan), plan.num_devices
        ('replicate=2,shard=2,precision=bf16', 4)
        >>> Plan.parse(str(plan)) == plan
        True
        >>> str(Plan(tensor=2, pipeline=2, layers=(3, 5)))
        'tensor=2,pipeline=2,micro_batches=2,layers=3+5'
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = field(default=1, kw_only=True)
    sequence_parallel: bool = field(default=False, kw_only=True)
    pipeline: int = field(default=1, kw_only=True)
    micro_batches: int = field(default=_UNSET, kw_only=True)
    schedule: str = field(default="1f1b", kw_only=True)
    stages_per_device: int = field(default=_UNSET, kw_only=True)
    layers: tuple[int, ...] = field(default=(), kw_only=True)
    recompute: str | int = field(default="none", kw_only=True)
    precision: str = field(default="fp32", kw_only=True)
    offload: str = field(default="none", kw_only=True)
    compile: str = field(default="none", kw_only=True)

    def __post_init__(self) -> None:
        for name in WORDS:
            check_word(name, getattr(self, name))
        check_size("pipeline", self.pipeline)
        if self.stages_per_device is None:
            object.__setattr__(self, "stages_per_device", 2 if self.schedule == "interleaved" else 1)
        check_size("stages_per_device", self.stages_per_device)
        if self.micro_batches is None:
            object.__setattr__(self, "micro_batches", self.num_stages if self.pipeline > 1 else 1)
        for name in _SIZES:
            check_size(name, getattr(self, name))
        check_recompute(self.recompute)
        check_sequence_parallel(self.sequence_parallel, self.tensor)
        check_layers(self.layers)
        check_offload(self.offload, self.tensor, self.pipeline)
        check_compile(self.compile, self.tensor, self.schedule)
        check_pipeline(
            PipelineFields(self.pipeline, self.schedule, self.stages_per_device, self.micro_batches, self.layers)
        )

    @property
    def num_devices(self) -> int:
        """Number of devices that the plan occupies."""
        return self.data_parallel * self.tensor * self.pipeline

    @property
    def data_parallel(self) -> int:
        """Number of slices into which the global batch is cut."""
        return self.replicate * self.shard

    @property
    def gathers_in_turn(self) -> bool:
        """Whether a device has a block's whole parameters only while it computes with them."""
        return self.pipeline == 1 and (self.shard > 1 or self.offload == "all")

    @property
    def bytes_per_value(self) -> float:
        """Bytes of a value in the precision in which the plan computes."""
        return 2.0 if self.precision == "bf16" else 4.0

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline, 1 without one."""
        return self.pipeline * self.stages_per_device

    @property
    def why_uncompiled(self) -> str:
        """Why blocks cannot be compiled under the plan, as the end of a sentence; "" if they can."""
        return why_uncompiled(self.tensor, self.schedule)

    def with_compiled_blocks(self) -> Plan:
        """Returns the plan with compiled blocks; itself if they cannot be compiled under it."""
        return self if self.why_uncompiled else replace(self, compile="blocks")

    def whole_model(self) -> Plan:
        """Returns the plan for the same devices under which each has the whole model, uncompiled, and a call runs at
        once: what gradients of gradients need. State that was in host memory stays there, parameters do not."""
        return Plan(self.num_devices, offload="none" if self.offload == "none" else "optimizer")

    def __str__(self) -> str:
        shown = []
        for one in fields(self):
            value = getattr(self, one.name)
            if value != self._default_of(one.name, one.default):
                shown.append(f"{one.name}={spell(value)}")
        return ",".join(shown) or "replicate=1"

    def _default_of(self, name: str, default: object) -> object:
        """Returns the value that need not be written, None where every value is because the default depends."""
        if name == "micro_batches":
            return 1 if self.pipeline == 1 else None
        if name == "stages_per_device":
            return None if self.schedule == "interleaved" else 1
        return default

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Returns the plan that `text` spells, such as `shard=2,tensor=2,pipeline=2,micro_batches=4,layers=3+5`.

        Spaces around names and values do not matter; whatever is left out has its default.

        Raises:
            PlanError: The text is not a list of `name=value`, a name is unknown, comes twice or belongs to an axis
                that this version does not have, or a value is impossible.
        """
        if not isinstance(text, str):
            raise PlanError(f"plan: {text!r} is a {type(text).__name__}", "a text or a Plan", _EXAMPLE)
        names = [one.name for one in fields(cls)]
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if name in _LATER_AXES:
                raise PlanError(
                    f"plan: the axis {name!r} is not in this version", f"the names {', '.join(names)}", _EXAMPLE
                )
            if not equals or name not in names:
                raise PlanError(
                    f"plan: cannot read {part.strip()!r} in {text!r}",
                    f"name=value with the names {', '.join(names)}",
                    _EXAMPLE,
                )
            if name in values:
                raise PlanError(f"plan: {name} comes twice in {text!r}", "each name once", _EXAMPLE)
            values[name] = _parse_value(name, value)
        return cls(**values)

    def rows_per_micro_batch(self, batch: int) -> int:
        """Returns how many rows of a global batch of `batch` rows the fullest device computes at a time."""
        return -(-batch // (self.data_parallel * self.micro_batches))

    def stage_ranges(self, num_blocks: int) -> list[range]:
        """Returns which of a model's `num_blocks` blocks each stage holds, in order of stages.

        Without `layers` every stage has the same number of blocks. Remaining blocks go, one each, first to the
        stages in the middle, then to the first, which has the embedding, and never to the last, which has the head.

        Raises:
            PlanError: There are fewer blocks than stages, or `layers` has another number of blocks.

        Example:
            >>> Plan(pipeline=3).stage_ranges(8)
            [range(0, 3), range(3, 6), range(6, 8)]
        """
        if num_blocks < self.num_stages:
            raise PlanError(
                f"plan={str(self)!r}: the model has {num_blocks} blocks, too few for {self.num_stages} stages",
                f"pipeline x stages_per_device of at most {num_blocks}",
                f'plan="pipeline={num_blocks}"' if num_blocks > 1 else 'plan="replicate=2"',
            )
        if self.layers and sum(self.layers) != num_blocks:
            raise PlanError(
                f"plan={str(self)!r}: layers has {sum(self.layers)} blocks, the model {num_blocks}",
                f"{self.num_stages} numbers whose sum is {num_blocks}",
                f'plan="pipeline={self.num_stages},layers={spell(tuple(_even(num_blocks, self.num_stages)))}"',
            )
        ranges, start = [], 0
        for count in self.layers or _even(num_blocks, self.num_stages):
            ranges.append(range(start, start + count))
            start += count
        return ranges

    def platform_line(self, batch: int) -> str:
        """Returns the plan in the words of the platform's log, for a global batch of `batch` rows.

        `recomputation` is 0 for none, 1 for selective, and 2 where blocks are computed again in full.

        Example:
            >>> Plan(shard=4, micro_batches=2).platform_line(16)[:66]
            'num_stages : 1, num_micro_batches : 2, batch_per_device : 2, No TP'
        """
        recomputation = {"none": 0, "selective": 1}.get(str(self.recompute), 2)
        return (
            f"num_stages : {self.num_stages}, num_micro_batches : {self.micro_batches}, "
            f"batch_per_device : {self.rows_per_micro_batch(batch)}, "
            f"{'No TP' if self.tensor == 1 else f'TP : {self.tensor}'}, recomputation : {recomputation}, "
            f"distribute_param : {str(self.shard > 1).lower()}, distribute_low_prec_param : false"
        )


def _parse_value(name: str, value: str) -> object:
    """Returns `value` with the type of the field; whether it is possible is the plan's to say."""
    if name in WORDS:
        return value
    if name == "sequence_parallel":
        return {"true": True, "false": False}.get(value.lower(), value)
    if name == "layers":
        return tuple(_parse_count(count) for count in value.split("+"))
    if name == "recompute":
        return value if value in RECOMPUTE_KINDS else _parse_count(value)
    count = _parse_count(value)
    check_size(name, count)
    return count


def _parse_count(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _even(num_blocks: int, num_stages: int) -> list[int]:
    """Returns the number of blocks of every stage, as evenly as possible."""
    counts = [num_blocks // num_stages] * num_stages
    for stage in [*range(1, num_stages - 1), 0][: num_blocks % num_stages]:
        counts[stage] += 1
    return counts
