"""The plans of the matrix of families and plans, what a family must refuse, and which cells run by default.

Decides which cells there are and in which order they run. Must not know models, or how a cell is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from families import FAMILIES

from moreh_ap.plan import Plan

PLANS = {
    "one": "replicate=1",
    "one_micro": "replicate=1,micro_batches=2",
    "one_recompute": "replicate=1,recompute=full",
    "one_offload": "replicate=1,offload=optimizer",
    "replicate": "replicate=2",
    "shard": "shard=2",
    "replicate_micro": "replicate=2,micro_batches=2",
    "tensor": "tensor=2",
    "sequence": "tensor=2,sequence_parallel=true",
    "pipeline": "pipeline=2,micro_batches=4",
    "gpipe": "pipeline=2,micro_batches=3,schedule=gpipe",
    "interleaved": "pipeline=2,micro_batches=4,schedule=interleaved",
    "zero_bubble": "pipeline=2,micro_batches=4,schedule=zero_bubble",
    "uneven": "pipeline=2,micro_batches=2,layers=1+3",
    "recompute": "shard=2,recompute=full",
    "selective": "replicate=2,recompute=selective",
    "count": "pipeline=2,micro_batches=2,recompute=1",
    "offload": "shard=2,offload=optimizer",
    "bf16": "replicate=2,precision=bf16",
    "tensor_bf16": "tensor=2,precision=bf16",
    "pipeline_bf16": "pipeline=2,micro_batches=2,precision=bf16",
    "hybrid": "replicate=2,shard=2",
    "shard4_micro": "shard=4,micro_batches=2",
    "tensor4": "tensor=4",
    "pipeline4": "pipeline=4,micro_batches=4",
    "replicate_pipeline": "replicate=2,pipeline=2,micro_batches=2",
    "shard_tensor": "shard=2,tensor=2",
    "tensor_pipeline": "tensor=2,pipeline=2,micro_batches=2",
    "hybrid_tensor": "replicate=2,shard=2,tensor=2",
    "all": "shard=2,tensor=2,pipeline=2,micro_batches=4,recompute=full",
}
"""Text of each plan by the name that tests and results use; by number of devices, so that each mesh starts once."""

REFUSALS: dict[str, dict[str, str]] = {
    "mixtral_balanced": {"pipeline": "pipeline"},
    "t5": {"pipeline": "pipeline", "sequence": "sequence_parallel"},
    "convnet": {"sequence": "sequence", "tensor": "tensor", "pipeline": "pipeline", "recompute": "recompute"},
    "convnet_batchnorm": {
        "sequence": "sequence",
        "tensor": "tensor",
        "pipeline": "pipeline",
        "recompute": "recompute",
        "micro_batches": "batch normalisation",
    },
}
"""Family -> kind of plan that it has to refuse with a PlanError -> a word that the error must have in its text."""

WHOLE = ("mixtral_balanced",)
"""Families whose rows look at each other: exact because every device computes the whole batch. No other may do so."""

DEFAULT = {
    "replicate": ("llama3", "convnet_batchnorm", "t5"),
    "shard": ("gpt2", "qwen3_moe", "own_transformer"),
    "replicate_micro": ("nanogpt",),
    "tensor": ("gpt2", "llama3", "convnet"),
    "sequence": ("qwen2",),
    "pipeline": ("mistral", "gpt2", "t5"),
    "interleaved": ("llama3",),
    "zero_bubble": ("gpt_neox",),
    "uneven": ("nanogpt",),
    "recompute": ("gemma",),
    "selective": ("phi3",),
    "offload": ("llama2",),
    "bf16": ("llama2",),
    "pipeline_bf16": ("llama3",),
    "hybrid": ("bert",),
    "tensor_pipeline": ("opt",),
    "all": ("llama3",),
}
"""What runs without being asked for: every kind of plan and most families once, below three minutes on two cores."""


@dataclass(frozen=True)
class Cell:
    """One family under one plan.

    Attributes:
        family: A key of `FAMILIES`.
        plan: A key of `PLANS`.
    """

    family: str
    plan: str

    def __str__(self) -> str:
        return f"{self.plan}-{self.family}"

    @property
    def text(self) -> str:
        """The plan as it is written."""
        return PLANS[self.plan]

    @property
    def refusal(self) -> str | None:
        """The word that must be in the error, None where the plan has to work."""
        refused = REFUSALS.get(self.family, {})
        return next((word for kind, word in refused.items() if kind in kinds_of(self.text)), None)

    @property
    def bf16(self) -> bool:
        """Whether only the loss curve is held, to a wider limit."""
        return Plan.parse(self.text).precision == "bf16"


def kinds_of(text: str) -> set[str]:
    """Which kinds of parallelism and saving a plan uses."""
    plan = Plan.parse(text)
    used = {
        "replicate": plan.replicate > 1,
        "shard": plan.shard > 1,
        "tensor": plan.tensor > 1,
        "sequence": plan.sequence_parallel,
        "pipeline": plan.pipeline > 1,
        "micro_batches": plan.micro_batches > 1,
        "recompute": plan.recompute != "none",
        "offload": plan.offload != "none",
    }
    return {kind for kind, is_used in used.items() if is_used}


def all_cells() -> list[Cell]:
    """Every family under every plan, in the order in which they run."""
    return [Cell(family, plan) for plan in PLANS for family in FAMILIES]


def default_cells() -> list[Cell]:
    """What runs without being asked for, in the order in which it runs."""
    return [Cell(family, plan) for plan in PLANS for family in DEFAULT.get(plan, ())]
