"""Asks the planner for a plan and says in the log what was chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from moreh_ap.option import Options
from moreh_ap.planner import report
from moreh_ap.planner.choice import choose_plan
from moreh_ap.planner.profile import ModelProfile
from moreh_ap.planner.proven import proven_kinds
from moreh_ap.planner.ranking import Task
from moreh_ap.planner.shapes import TransformerShape
from moreh_ap.planner.space import Constraints, tensor_degrees_of
from moreh_ap.session.machine import Machine, machine_of
from moreh_ap.session.profiling import profile_model, shape_of
from moreh_ap.session.session import Session
from moreh_ap.session.watch import Expected, corrections_of


def choose_plan_for(
    session: Session, root: nn.Module, family: str, call: tuple[Any, Any], rows: int | None
) -> Expected:
    """Returns the plan for a model with what is predicted of it; logged, and written to the `.dump` files.

    Args:
        session: Where the workers are.
        root: The model.
        family: Its name in the list of proven ones.
        call: Positional and keyword arguments of its first call.
        rows: Rows of the global batch, None where no argument has any.

    Raises:
        PlanError: If no plan fits, or a forced plan does not match the devices.
    """
    options = session.options
    machine, shape = machine_of(session), shape_of(root)
    profile = profile_model(root, shape, call)
    task = Task(
        profile,
        machine.cluster,
        rows or 1,
        constraints_of(options, family, profile, shape, machine),
        machine.practice,
        machine.coefficients,
        corrections_of(machine.key),
    )
    choice = choose_plan(task, options.plan)
    lines = [*choice.lines, report.plan_line(choice.plan, choice.reason)]
    if options.detailed_log == 1:
        lines += report.candidate_lines(choice)
    elif options.detailed_log == 2:
        report.write_autoconfig_log(choice)
    for line in lines:
        print(line, flush=True)
    try:
        report.write_selected_config(choice.plan, task.global_batch)
    except OSError as error:  # the plan stands in the log too
        print(report.info(f"the selected plan cannot be written to a file: {error}"), flush=True)
    return Expected(machine.key, profile.name, task.global_batch, choice.chosen, task.corrections)


def constraints_of(
    options: Options, family: str, profile: ModelProfile, shape: TransformerShape | None, machine: Machine
) -> Constraints:
    """Returns what the user's options, and what is known of the model, leave of all plans."""
    has_blocks = profile.num_blocks > 1
    degrees = (1,) if shape is None else tensor_degrees_of(shape, machine.cluster.num_devices)
    left = Constraints.from_options(options, proven_kinds().get(family, frozenset()), degrees)
    recompute = left.activation_recomputation
    return replace(
        left,
        pipeline_parallel=left.pipeline_parallel and has_blocks,
        activation_recomputation=False if recompute == "auto" and not has_blocks else recompute,
        offload=machine.cluster.device.name != "CPU",  # what a CPU worker moves to host memory stays where it is
    )
