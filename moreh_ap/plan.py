"""The vocabulary of parallel plans: a small frozen object that prints as one line and parses back.

Decides which plans exist and how they are written. Planner, session, parallelizer, logs and documentation all speak
of plans through this module. Must not know models, devices, memory, processes or torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from moreh_ap.errors import PlanError

PRECISIONS = ("fp32", "bf16")
"""`fp32`: everything in float32. `bf16`: compute in bfloat16; weights, gradient sums and optimizer in float32."""

_LATER_AXES = ("tensor", "pipeline", "context", "expert")
_EXAMPLE = 'plan="replicate=2,shard=2,micro_batches=4,precision=bf16"'


@dataclass(frozen=True)
class Plan:
    """How one model is spread over the devices of one accelerator.

    Attributes:
        replicate: Number of groups that hold the whole model and share the global batch (data parallel).
        shard: Number of devices in a group that split parameters, gradients and optimizer state (FSDP2). They share
            the batch too. With `replicate` and `shard` both above 1 the plan is hybrid.
        micro_batches: Number of pieces in which a device works through its slice of the batch, one after another.
        precision: One of `PRECISIONS`.

    Raises:
        PlanError: A size is not an integer of at least 1, or the precision is unknown.

    Example:
        >>> plan = Plan(replicate=2, shard=2, precision="bf16")
        >>> str(plan), plan.num_devices
        ('replicate=2,shard=2,precision=bf16', 4)
        >>> Plan.parse(str(plan)) == plan
        True
    """

    replicate: int = 1
    shard: int = 1
    micro_batches: int = 1
    precision: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("replicate", "shard", "micro_batches"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise PlanError(f"plan: {name}={size!r} is no size", "an integer of at least 1", f'plan="{name}=2"')
        if self.precision not in PRECISIONS:
            raise PlanError(
                f"plan: precision={self.precision!r} is unknown", " or ".join(PRECISIONS), 'plan="precision=bf16"'
            )

    @property
    def num_devices(self) -> int:
        """Number of devices that the plan occupies."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(parts) or "replicate=1"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Returns the plan that `text` spells, such as `replicate=2,shard=2,micro_batches=4,precision=bf16`.

        Spaces around names and values do not matter; whatever is left out has its default.

        Raises:
            PlanError: The text is not a list of `name=value`, a name is unknown, comes twice or belongs to an axis
                that this version does not have, or a value is impossible.
        """
        if not isinstance(text, str):
            raise PlanError(f"plan: {text!r} is a {type(text).__name__}", "a text or a Plan", _EXAMPLE)
        names = [f.name for f in fields(cls)]
        values: dict[str, int | str] = {}
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
            values[name] = value if name == "precision" else _parse_size(name, value)
        return cls(**values)  # type: ignore[arg-type]

    def rows_per_micro_batch(self, batch: int) -> int:
        """Returns how many rows of a global batch of `batch` rows the fullest device computes at a time."""
        return -(-batch // (self.num_devices * self.micro_batches))

    def platform_line(self, batch: int) -> str:
        """Returns the plan in the words of the platform's log, for a global batch of `batch` rows.

        Example:
            >>> Plan(shard=4, micro_batches=2).platform_line(16)[:66]
            'num_stages : 1, num_micro_batches : 2, batch_per_device : 2, No TP'
        """
        return (
            f"num_stages : 1, num_micro_batches : {self.micro_batches}, "
            f"batch_per_device : {self.rows_per_micro_batch(batch)}, No TP, recomputation : 0, "
            f"distribute_param : {str(self.shard > 1).lower()}, distribute_low_prec_param : false"
        )


def _parse_size(name: str, value: str) -> int:
    """Returns `value` as an integer; whether its size is possible is the plan's to say."""
    try:
        return int(value)
    except ValueError:
        raise PlanError(f"plan: {name}={value!r} is no size", "an integer of at least 1", f'plan="{name}=2"') from None
