"""Asks the planner for a plan and logs the choice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from moreh_ap import log
from moreh_ap.device.patches.compiling import compiled_in
from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.profiles.model_profile import ModelProfile
from moreh_ap.planner.profiles.transformer_shape import TransformerShape
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.choice import Choice, choose_plan
from moreh_ap.planner.search.constraints import Constraints
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.search_space import tensor_degrees_of
from moreh_ap.planner.search.verified_kinds import verified_kinds
from moreh_ap.protocol.blocks import block_lists
from moreh_ap.protocol.dropout import draws_random_numbers
from moreh_ap.session.models.script_hooks import has_hooks_of_script
from moreh_ap.session.planning import oom_records
from moreh_ap.session.planning.machine_profile import Machine, machine_of
from moreh_ap.session.planning.model_profiling import joins_rows, profile_model, shape_of, trains_weights
from moreh_ap.session.planning.step_watch import Expected, corrections_of
from moreh_ap.session.session import Session
from moreh_ap.settings import Options


@dataclass(frozen=True)
class Planned:
    """A plan for a model, and the other candidates.

    Attributes:
        expected: The plan with its predictions.
        task: The task of the search.
        candidates: The plans that fit, best first; only the given plan if the script gave one.
        family: The model's name in the list of verified families.
        is_given: Whether the script gave the plan.
    """

    expected: Expected
    task: Task
    candidates: tuple[Candidate, ...]
    family: str
    is_given: bool

    @property
    def chosen(self) -> Candidate:
        """The plan with its predictions."""
        return self.expected.chosen

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.expected.chosen.plan

    def instead(self, chosen: Candidate) -> Planned:
        """Returns the same with another plan."""
        return replace(self, expected=replace(self.expected, chosen=chosen))


def choose_plan_for(
    session: Session, root: nn.Module, family: str, call: tuple[nn.Module, Any, Any], rows: int | None
) -> Planned:
    """Returns the plan for a model with its predictions; logs it and writes it to the `.dump` files.

    Args:
        session: The session of the workers.
        root: The model.
        family: Its name in the list of verified families.
        call: Module, positional and keyword arguments of its first call.
        rows: Rows of the global batch, None if no argument has rows.

    Raises:
        PlanError: If no plan fits, or a forced plan does not match the devices.
    """
    options = session.options
    shape = shape_of(root)
    profile = profile_model(root, shape, call, rows or 1)  # may import for seconds, while the workers start
    machine = machine_of(session)
    # On CPU workers dropout has one device's masks, which only data-parallel plans can draw (`shared_draws.py`).
    draws_apart = machine.cluster.device.name == "CPU" and draws_random_numbers(root)()
    shares_batch_only = draws_apart or has_hooks_of_script(root)
    system = replace(machine.system, trains_weights=trains_weights(root))
    constraints = constraints_of(options, "" if shares_batch_only else family, profile, shape, machine)
    given, is_compiled = options.plan, bool(compiled_in(root))
    has_blocks = is_compiled and bool(block_lists(root))
    if has_blocks:
        constraints = replace(constraints, compiles_blocks=True)
        given = None if given is None else given.with_compiled_blocks()
    if joins_rows(root):
        constraints = without_pieces(constraints, given)
    task = Task(
        profile,
        machine.cluster,
        rows or 1,
        constraints,
        system,
        machine.coefficients,
        corrections_of(machine.key),
    )
    limit_bytes = oom_records.limit_of(machine.key, profile.name, task.global_batch, task.corrections.memory)
    choice = _choose(task, limit_bytes, given)
    lines = log.choice_lines(choice)
    if is_compiled and choice.plan.compile == "none":
        lines.append(log.uncompiled_line(choice.plan.why_uncompiled if has_blocks else ""))
    if options.detailed_log == 1:
        lines += log.candidate_lines(choice)
    elif options.detailed_log == 2:
        log.write_autoconfig_log(choice)
    say(lines)
    write_selected(choice.plan, task)
    expected = Expected(machine.key, profile.name, task.global_batch, choice.chosen, task.corrections)
    fitting = tuple(one for one in choice.candidates if one.fits and one.step is not None)
    return Planned(expected, task, fitting, family, options.plan is not None)


def say(lines: Iterable[str]) -> None:
    """Prints lines of the log."""
    for line in lines:
        print(line, flush=True)


def write_selected(plan: Plan, task: Task) -> None:
    """Writes the selected plan to its `.dump` file."""
    try:
        log.write_selected_config(plan, task.global_batch)
    except OSError as error:  # the plan is in the log too
        say([log.info(f"the selected plan cannot be written to a file: {error}")])


def _choose(task: Task, limit_bytes: float, given: Plan | None) -> Choice:
    """Returns a plan within the limit of earlier runs of the model; without the limit if no plan fits into it."""
    if given is None and limit_bytes < task.usable_bytes:
        try:
            return choose_plan(task.with_usable(limit_bytes))
        except PlanError:
            say([log.info("plans of this model ran out of memory before, and none needs less: tried again")])
    return choose_plan(task, given)


def constraints_of(
    options: Options, family: str, profile: ModelProfile, shape: TransformerShape | None, machine: Machine
) -> Constraints:
    """Returns the space of plans that the user's options and the model allow."""
    has_blocks = profile.num_blocks > 1
    degrees = (1,) if shape is None else tensor_degrees_of(shape, machine.cluster.num_devices)
    left = Constraints.from_options(options, verified_kinds().get(family, frozenset()), degrees)
    recompute = left.activation_recomputation
    return replace(
        left,
        pipeline_parallel=left.pipeline_parallel and has_blocks,
        activation_recomputation=False if recompute == "auto" and not has_blocks else recompute,
        offload=machine.cluster.device.name != "CPU",  # a CPU worker's memory is host memory: offload saves nothing
    )


def without_pieces(constraints: Constraints, given: Plan | None) -> Constraints:
    """Returns what is left for a model whose rows meet in batch normalisation: every call computes all rows at a time.

    Raises:
        PlanError: The script asks for micro-batches or a pipeline.
    """
    asked = constraints.num_micro_batches if given is None else given.micro_batches
    if asked not in ("auto", 1) or (given is not None and given.pipeline > 1):
        what = f"num_micro_batches={asked}" if given is None else f"plan={str(given)!r}"
        raise PlanError(
            f"{what} cuts the batch into micro-batches, and batch normalisation takes the statistics of all its rows",
            "plans with micro_batches=1 and pipeline=1; gradients of several batches may be accumulated by the script",
            "torch.moreh.option.enable_advanced_parallelization()",
        )
    return replace(constraints, num_micro_batches=1, pipeline_parallel=False)
