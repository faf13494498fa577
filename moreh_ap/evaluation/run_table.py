"""Tables of training runs: what a row says about model, plan, devices and program.

Decides how columns become a profile, a plan, a cluster and a system, and what is assumed where a column is blank.
Must not look at what was measured: `MEASURED_COLUMNS` are never read here, and a test takes them away to show it.

[Note: blank columns]
A blank column is filled with what its source's program does: see `_system_of`. A blank micro-batch is 1, sharding
follows the program, recomputation is "selective" where the program has fused attention and "none" else. A row without
the model's widths has those of the model of its name in `known_models.json`. A model with experts needs the column
`ep`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moreh_ap.errors import OptionError
from moreh_ap.evaluation.expert_parallelism import ExpertAxis, axis_of
from moreh_ap.plan import Plan
from moreh_ap.planner.cost import hardware
from moreh_ap.planner.cost.training_systems import (
    EAGER_MEGATRON,
    PLAIN_MEGATRON,
    TUNED_FSDP,
    TUNED_MEGATRON,
    TrainingSystem,
)
from moreh_ap.planner.profiles.known_models import find_model
from moreh_ap.planner.profiles.model_profile import ModelProfile
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of

__all__ = ["MEASURED_COLUMNS", "Run", "is_true", "run_of"]

MEASURED_COLUMNS = frozenset(
    {
        "status",
        "oom_error",
        "tokens_per_s_per_gpu",
        "model_tflops_per_gpu",
        "tflops_per_gpu",
        "mfu",
        "step_time_s",
        "peak_mem_gib",
        "mem_reserved_gib",
        "mem_alloc_gib_optimizer_phase",
        "nccl_allreduce_gbps",
        "nccl_allgather_gbps",
        "nccl_reducescatter_gbps",
        "nccl_ar_intra_gbps",
    }
)
"""Columns that were measured in the run itself."""

_BEFORE_FIX: dict[str, Any] = {
    "partition": "past_cost",
    "boundary_kept": 0.0,
    "logits_peak_bytes": 8.0,
    "logits_left_bytes": 0.0,
}
_BEFORE_FIX_WITHOUT_PIPELINE: dict[str, Any] = {"gathered_kept": 3.9}
"""Training system of the sweep's program before its pipeline was repaired (column `after_pp_fix`)."""


@dataclass(frozen=True)
class Run:
    """A row in the planner's terms."""

    profile: ModelProfile
    plan: Plan
    global_batch: int
    cluster: hardware.Cluster
    system: TrainingSystem
    experts: ExpertAxis | None = None


def run_of(row: Mapping[str, str]) -> Run:
    """Returns what a row of either table describes. See [Note: blank columns].

    Raises:
        MorehError: A column without which there is no prediction is blank, or a value is impossible.
    """
    row = {name: value for name, value in row.items() if name not in MEASURED_COLUMNS}
    system = _system_of(row)
    context = _whole(row, "cp", 1)
    length = _whole(row, "seq_len")
    if length % context:
        raise OptionError(f"seq_len={length} does not divide among cp={context} devices", "a multiple")
    shape = _shape_of(row, length)
    cluster = _cluster_of(row)
    plan, batch, system = _plan_of(row, shape, cluster, system, context)
    degree = _whole(row, "ep", 1 if shape.num_experts == 1 or cluster.num_devices == 1 else None)
    spread = max(1, degree // plan.tensor)
    if shape.num_experts % spread or plan.data_parallel % spread:
        fact = f"ep={degree} with {shape.num_experts} experts and {plan.data_parallel} x tp={plan.tensor} devices"
        raise OptionError(fact, "a number that divides experts and devices")
    profile = profile_of(shape, length // context, length, spread)
    return Run(profile, plan, batch, cluster, system, axis_of(shape, degree, spread))


def _shape_of(row: Mapping[str, str], length: int) -> TransformerShape:
    if not row.get("hidden", "").strip() and row.get("model"):
        return _public_shape(row)
    hidden = _whole(row, "hidden")
    heads = _whole(row, "n_heads", max(1, hidden // 64 if hidden < 4096 else hidden // 128))
    kv_heads = _whole(row, "n_kv_heads", heads)
    name = row.get("model", "") or f"{row.get('n_params_b', '')}B"
    plain = any(word in name.lower() for word in ("gpt", "mpt", "opt", "bloom", "nemotron"))
    ffn = _whole(row, "ffn_hidden", 4 * hidden)
    gated = "n_params_b" in row and not plain and _is_gated(row, hidden, ffn, heads, kv_heads)
    return TransformerShape(
        num_layers=_whole(row, "n_layers"),
        hidden=hidden,
        ffn_hidden=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocabulary=_whole(row, "vocab", 51200),
        tied=is_true(row.get("tied_embeddings", "")) if row.get("tied_embeddings") else plain,
        gated=gated,
        biases=plain,
        learned_positions=length if plain else 0,
        name=name,
    )


def _public_shape(row: Mapping[str, str]) -> TransformerShape:
    """Returns the shape of the public model that the row names; what its name says in brackets is left out."""
    try:
        return find_model(re.sub(r"\(.*?\)", "", row["model"])).shape
    except OptionError as error:
        raise OptionError("hidden is blank", "a number, or a model that is known by its name", error.fix) from error


def _is_gated(row: Mapping[str, str], hidden: int, ffn: int, heads: int, kv_heads: int) -> bool:
    """Returns whether the number of parameters that the row states is nearer to that of a gated feed-forward."""
    stated = row.get("n_params_b", "")
    if not stated:
        return True
    billions = _number(row, "n_params_b")
    layers, vocabulary = _whole(row, "n_layers"), _whole(row, "vocab", 51200)
    attention = 2 * hidden * hidden * (1 + kv_heads / heads)

    def wrong(matrices: int, tables: int) -> float:
        return abs(layers * (attention + matrices * hidden * ffn) + tables * vocabulary * hidden - billions * 1e9)

    return min(wrong(3, 1), wrong(3, 2)) <= min(wrong(2, 1), wrong(2, 2))


def _cluster_of(row: Mapping[str, str]) -> hardware.Cluster:
    per_node = _whole(row, "gpus_per_node") if row.get("gpus_per_node") else None
    inter = ""
    if not row.get("source") and row.get("after_pp_fix"):  # the sweep, whose two periods differ in their network
        inter = "EFA-32-crowded" if is_true(row["after_pp_fix"]) else "EFA-32"
    return hardware.find_cluster(row.get("gpu", ""), _whole(row, "n_gpus"), per_node, inter)


def _system_of(row: Mapping[str, str]) -> TrainingSystem:
    """Returns the training system of the program that a row comes from, by its `source`; by default the sweep's."""
    source = row.get("source", "").lower()
    if not source:
        system = EAGER_MEGATRON.with_zero_stage(_whole(row, "zero_stage", 0, least=0))
        if is_true(row.get("after_pp_fix", "true")):
            return system
        return replace(system, **(_BEFORE_FIX if _whole(row, "pp", 1) > 1 else _BEFORE_FIX_WITHOUT_PIPELINE))
    precision = "fp8" if "fp8" in row.get("precision", "") else ""
    sharded = any(word in source for word in ("titan", "torchao", "foundry", "fsdp", "automodel", "mi250", "primus"))
    plain = source in ("amp", "vtrain", "megatron-lm-2021", "korthikanti-2022")
    system = TUNED_FSDP if sharded else PLAIN_MEGATRON if plain else TUNED_MEGATRON
    system = replace(system, matrix_precision=precision)
    if "titan" in row.get("notes", ""):
        system = replace(system, selective_again=0.5)  # every second product, torchtitan's "per-op" choice
    if re.search(r"\bLoRA\b", row.get("notes", "")):
        system = replace(system, trains_weights=False)
    return system


def _plan_of(
    row: Mapping[str, str], shape: TransformerShape, cluster: hardware.Cluster, system: TrainingSystem, context: int
) -> tuple[Plan, int, TrainingSystem]:
    """Returns the plan, its rows with devices that share a row counted as replicas, and the system."""
    pipeline, tensor = _whole(row, "pp", 1), _whole(row, "tp", 1)
    if cluster.num_devices % (pipeline * tensor * context):
        fact = f"{cluster.num_devices} devices do not divide among tp={tensor} x pp={pipeline} x cp={context}"
        raise OptionError(fact, "a multiple of them")
    data = cluster.num_devices // (pipeline * tensor * context)
    micro_batch = _whole(row, "micro_batch", 1)
    local = re.search(r"local batch (\d+)", row.get("notes", ""))
    rows = int(local[1]) if local else micro_batch * (4 * pipeline if pipeline > 1 else 1)
    batch = _whole(row, "global_batch_sequences", data * rows)
    count = max(1, batch // (data * micro_batch))
    stages = _whole(row, "vpp", 1) if pipeline > 1 else 1
    sharing = data * context
    shard = min(_whole(row, "fsdp", sharing if system.gathers_blocks else 1, least=0) or 1, sharing)
    if system.gathers_blocks and shard == 1:
        system = replace(system, zero_stage=2)
    recompute = row.get("recompute", "") or "none"
    interleaved = stages > 1 and shape.num_layers >= pipeline * stages and not count % max(1, count // pipeline)
    schedule = "interleaved" if interleaved else "1f1b"
    if pipeline == 1:
        schedule = "1f1b"
    elif count < pipeline and not interleaved:
        schedule = "gpipe"  # with so few micro-batches 1F1B and GPipe are one order
    plan = Plan(
        sharing // shard,
        shard,
        tensor=tensor,
        sequence_parallel=tensor > 1 and row.get("sp", "") != "False",
        pipeline=pipeline,
        micro_batches=count,
        schedule=schedule,
        stages_per_device=stages if interleaved else 1,
        recompute=recompute,
        precision="fp32" if row.get("precision", "").strip().lower() == "fp32" else "bf16",
    )
    return plan, batch * context, system


def _whole(row: Mapping[str, str], name: str, default: int | None = None, least: int = 1) -> int:
    """Returns a column's whole number.

    Raises:
        OptionError: It is blank and there is no default, or it is no number of at least `least`.
    """
    text = row.get(name, "").strip()
    if not text:
        if default is None:
            raise OptionError(f"{name} is blank", "a number")
        return default
    number = _number(row, name)
    if number < least or number != int(number):
        raise OptionError(f"{name}={text!r}", f"a whole number of at least {least}")
    return int(number)


def _number(row: Mapping[str, str], name: str) -> float:
    try:
        number = float(row[name])
    except ValueError:
        raise OptionError(f"{name}={row[name]!r}", "a number") from None
    if not math.isfinite(number):
        raise OptionError(f"{name}={row[name]!r}", "a number")
    return number


def is_true(text: str) -> bool:
    """Returns whether a column says yes."""
    return text.strip().lower() in ("1", "true", "yes")
