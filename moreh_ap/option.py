"""The one line that users add.

Decides what its arguments are called. Checking them is `moreh_ap.settings`'; everything else begins in
`moreh_ap.accelerator.enabling.enable`, and nothing heavy is imported before that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from moreh_ap import checked_versions
from moreh_ap.accelerator import enabling
from moreh_ap.hosts.host_list import file_of_hosts, parse_hosts
from moreh_ap.local import logger
from moreh_ap.plan import Plan
from moreh_ap.settings import (
    Options,
    check_autosave,
    check_bool,
    check_bool_or_auto,
    check_count,
    check_count_or_auto,
    check_recovery,
    check_report,
    enabled_by_environment,
    resolve_options,
)

__all__ = ["Options", "enable_advanced_parallelization"]


def enable_advanced_parallelization(
    pipeline_parallel: bool = True,
    num_stages: int | Literal["auto"] = "auto",
    num_micro_batches: int | Literal["auto"] = "auto",
    activation_recomputation: bool | Literal["auto"] = "auto",
    distribute_parameter: bool | Literal["auto"] = "auto",
    mixed_precision: bool = True,
    *,
    devices: int | None = None,
    plan: str | Plan | None = None,
    autotune: bool = False,
    hosts: str | Sequence[str] | None = None,
    report: bool | str | os.PathLike[str] = False,
    recovery: Literal["off", "memory", "auto"] | None = None,
    elastic: bool | None = None,
    autosave: str | os.PathLike[str] | None = None,
) -> None:
    """Makes "cuda" mean all devices of this machine, used as one accelerator, for the rest of the process.

    It may stand before or after the model is made. A second call with equal settings does nothing, unless the
    workers are lost: then it starts others. The plan is chosen at a model's first call, among those that the arguments
    leave.

    Args:
        pipeline_parallel: Whether a pipeline may be used. A permission: the planner uses one where it is faster or
            nothing fits without. False refuses a `plan` that has one.
        num_stages: Largest total number of pipeline stages, also if a device has several. A `plan` with more is
            refused.
        num_micro_batches: Exact number of micro-batches into which a device divides its batch slice; "auto" takes as
            many as fill a pipeline, or as let the batch fit into memory.
        activation_recomputation: Whether every block recomputes its activations in the backward, selectively or in
            full (True), or none does (False); "auto" recomputes as little as lets a plan fit.
        distribute_parameter: True shards parameters, gradients and optimizer state over devices that share the batch,
            False never does, "auto" does where it is faster or nothing fits without.
        mixed_precision: Whether to compute in bfloat16 on GPUs that have it natively. CPU workers compute in float32
            unless a plan says ``precision=bf16``.
        devices: Number of devices to use; default: `MOREH_NUM_DEVICES`, else the plan's, else all.
        plan: A plan, or its text, to use instead of the planner's choice, even if it is predicted not to fit;
            default: `MOREH_PLAN`, else the planner's choice.
        autotune: Whether to train the model for a few steps under each of the three best plans that differ in more than
            details, and to keep the fastest. Costs loading the model and five steps for each; the training itself is
            not touched.
        hosts: Machines whose devices are used together: names that ssh knows, or lines that ``moreh-ap host`` printed,
            as a list, with commas, or as the path of a file of lines; "slurm" or "kubernetes": those of the job in
            which the script runs. Default: `MOREH_HOSTS`, else this machine. The call waits until they have joined.
        report: Whether a report of the run is written when it ends: a page, and the JSON that it is made from. True
            writes it into the folder ``moreh_report``; a path is another folder. Default: `MOREH_REPORT`, else none.
        recovery: "memory" keeps what workers were told, so that others take over where one is lost, and the training
            goes on with the same numbers; "auto" does so with copies as rare as lets them cost next to nothing,
            "off" never. Default: `MOREH_RECOVERY`, else "auto", which does nothing on GPUs: the cost is not known.
        elastic: Whether hosts are used that join during the run, as soon as recovery has a copy for them: those that
            were lost, and those that the file of `hosts` names since; and devices of this machine that were gone.
            Default: `MOREH_ELASTIC`, else False.
        autosave: A folder into which checkpoints of all models and optimizers that train are saved every ten minutes
            (`MOREH_AUTOSAVE_MINUTES`) and at SIGTERM; `moreh_ap.load` loads the last one. Default: `MOREH_AUTOSAVE`,
            else none.

    Raises:
        MeshStartError: A host cannot join.
        OptionError: An argument or environment variable has a wrong type or value, or two contradict each other.
        PlanError: The text of `plan` is no plan.

    Warns:
        VersionWarning: This package was not checked with the versions of Python and libraries here.
    """
    logger.check_level(os.environ)
    options = resolve_options(
        os.environ,
        pipeline_parallel=check_bool("pipeline_parallel", pipeline_parallel),
        num_stages=check_count_or_auto("num_stages", num_stages),
        num_micro_batches=check_count_or_auto("num_micro_batches", num_micro_batches),
        activation_recomputation=check_bool_or_auto("activation_recomputation", activation_recomputation),
        distribute_parameter=check_bool_or_auto("distribute_parameter", distribute_parameter),
        mixed_precision=check_bool("mixed_precision", mixed_precision),
        devices=None if devices is None else check_count("devices", devices),
        plan=plan if plan is None or isinstance(plan, Plan) else Plan.parse(plan),
        autotune=check_bool("autotune", autotune),
        hosts=() if hosts is None else parse_hosts(hosts),
        hosts_file=file_of_hosts(hosts),
        report_folder=check_report(report),
        recovery=None if recovery is None else check_recovery("recovery", recovery),
        elastic=None if elastic is None else check_bool("elastic", elastic),
        autosave_folder=check_autosave(autosave),
    )
    checked_versions.warn_if_unchecked(stacklevel=3)
    enabling.enable(options)


def enable_where_asked(environment: Mapping[str, str]) -> None:
    """Does what the one line does, if `MOREH_ENABLE_ADVANCED_PARALLELIZATION` asks for it.

    Raises:
        OptionError: The variable is neither `0` nor `1`, or as for the line.
    """
    if enabled_by_environment(environment):
        enable_advanced_parallelization()
