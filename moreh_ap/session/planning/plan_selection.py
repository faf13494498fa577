"""Asks the planner for a plan and logs the choice."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from moreh_ap import log
from moreh_ap.device.patches.compiling import compiled_in, declined_in
from moreh_ap.errors import PlanError
from moreh_ap.local import cpp_compiler, logger
from moreh_ap.local.memory_limit import memory_limit
from moreh_ap.plan import Plan
from moreh_ap.planner.profiles.model_profile import ModelProfile
from moreh_ap.planner.profiles.transformer_shape import TransformerShape
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.choice import Choice, choose_plan
from moreh_ap.planner.search.constraints import Constraints, for_packed_weights, with_parameters_in_place
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import UNCORRECTED, Corrections, Task
from moreh_ap.planner.search.search_space import tensor_degrees_of
from moreh_ap.planner.search.verified_kinds import verified_kinds
from moreh_ap.protocol.blocks import block_lists, module_that_renames, modules_aside
from moreh_ap.protocol.dropout import draws_random_numbers
from moreh_ap.session.models.script_hooks import has_hooks_of_script
from moreh_ap.session.planning import device_count, oom_records
from moreh_ap.session.planning.compiled_runs import measured
from moreh_ap.session.planning.device_count_records import script_key
from moreh_ap.session.planning.machine_profile import Machine, machine_of, machine_on
from moreh_ap.session.planning.model_profiling import has_items, identity_of, joins_rows, profile_model, shape_of
from moreh_ap.session.planning.packed_weights import has_packed_weights
from moreh_ap.session.planning.step_watch import Expected, corrections_of
from moreh_ap.session.session import Session
from moreh_ap.settings import Options
from moreh_ap.states import SessionState


@dataclass(frozen=True)
class Planned:
    """A plan for a model, and the other candidates.

    Attributes:
        expected: The plan with its predictions.
        task: The task of the search.
        candidates: The plans that fit, best first; only the given plan if the script gave one.
        family: The model's name in the list of verified families.
        is_given: Whether the script gave the plan.
        on_all: Where fewer devices than there are have workers: the plan on all of them, if one fits.
        tries_compiled: Whether compiled blocks are tried after the first steps (`compiled_runs.py`).
    """

    expected: Expected
    task: Task
    candidates: tuple[Candidate, ...]
    family: str
    is_given: bool
    on_all: Planned | None = None
    tries_compiled: bool = False

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

    Where fewer devices than there are would be faster, the workers are restarted on them first (`device_count.py`).

    Args:
        session: The session of the workers.
        root: The model.
        family: Its name in the list of verified families.
        call: Module, positional and keyword arguments of its first call.
        rows: Rows of the global batch, None if no argument has rows.

    Raises:
        PlanError: If no plan fits, or a forced plan does not match the devices.
    """
    options, shape = session.options, shape_of(root)
    profile = profile_model(root, shape, call, rows or 1)  # may import for seconds, while the workers start
    question = Question(options, root, family, profile, shape, rows or 1, has_items(call, rows))
    is_first = session.outbox.state.current is SessionState.EMPTY
    machine, choice = _choice_on_its_devices(session, question, identity_of(root, call[1:]), is_first=is_first)
    choice, compiled_before = question.compiled_if_it_paid(session, machine, choice)
    for line in log.search_lines(choice):
        logger.say(line)
    logger.say(log.plan_line(choice.plan, log.reason(choice)), logger.NOTICE)
    lines = list(compiled_before)
    if question.is_compiled and choice.plan.compile == "none":
        lines.append(log.uncompiled_line(choice.plan.why_uncompiled if question.has_blocks else ""))
    if options.detailed_log == 1:
        lines += log.candidate_lines(choice)
    elif options.detailed_log == 2:
        log.write_autoconfig_log(choice)
    for line in lines:
        logger.say(line)
    write_selected(choice.plan, choice.ranking.task)
    planned = question.planned(machine, choice)
    planned = replace(planned, tries_compiled=question.tries_compiled(session, machine, choice))
    if session.uses_fewer_devices and options.plan is None:
        key = script_key(session.device_type, session.max_devices) if is_first else ""
        planned = replace(planned, expected=replace(planned.expected, script=key), on_all=_on_all(session, question))
    if session.report is not None:
        session.report.planned(root, planned, log.reason(choice))
    return planned


@dataclass(frozen=True)
class Question:
    """The planning task of a model, for any devices.

    Attributes:
        options: The script's options.
        root: The model.
        family: Its name in the list of verified families.
        profile: What it is made of.
        shape: Its shape, if it is a decoder of transformers.
        rows: Rows of the global batch.
        has_items: Whether the first call has items, such as pictures of its rows: calls are not cut by rows then.
    """

    options: Options
    root: nn.Module
    family: str
    profile: ModelProfile
    shape: TransformerShape | None
    rows: int
    has_items: bool = False

    @property
    def model_name(self) -> str:
        """The name under which runs of the model are saved: many a script calls its models alike."""
        return f"{self.profile.name}, {round(self.profile.parameters)} parameters"

    @property
    def is_compiled(self) -> bool:
        """Whether the script has compiled the model or a part of it."""
        return bool(compiled_in(self.root))

    @property
    def has_blocks(self) -> bool:
        """Whether it has and can be compiled block by block."""
        return self.is_compiled and bool(block_lists(self.root))

    @property
    def given(self) -> Plan | None:
        """The plan that the script asks for."""
        given = self.options.plan
        return given.with_compiled_blocks() if given is not None and self.has_blocks else given

    def task_on(self, machine: Machine, otherwise: Corrections = UNCORRECTED) -> Task:
        """Returns the planner's task on a machine.

        Args:
            machine: The devices.
            otherwise: The corrections if nothing was learned on this machine.

        Raises:
            PlanError: The script asks for micro-batches, and the model's rows meet.
        """
        root = self.root
        # On CPU workers dropout has one device's masks, which only data-parallel plans can draw (`shared_draws.py`).
        draws_apart = machine.cluster.device.name == "CPU" and draws_random_numbers(root)()
        family = "" if draws_apart or has_hooks_of_script(root) else self.family
        constraints = constraints_of(self.options, family, self.profile, self.shape, machine)
        if self.has_blocks:
            constraints = replace(constraints, compiles_blocks=True)
        if has_packed_weights(root):
            constraints = for_packed_weights(constraints, self.given)
        if module_that_renames(root) is not None or modules_aside(root):
            constraints = with_parameters_in_place(constraints)
        if self.has_items and self.given is None and constraints.num_micro_batches == "auto":
            constraints = replace(constraints, num_micro_batches=1, pipeline_parallel=False)
        if joins_rows(root):
            constraints = without_pieces(constraints, self.given)
        return Task(
            self.profile,
            machine.cluster,
            self.rows,
            constraints,
            replace(machine.system, trains_weights=self.profile.frozen is None),
            machine.coefficients,
            corrections_of(machine.key, otherwise, self.model_name),
        )

    def limit_bytes(self, machine: Machine, task: Task) -> float:
        """Returns the predicted bytes above which plans of the model ran out of memory on a machine."""
        return oom_records.limit_of(machine.key, self.model_name, self.rows, task.corrections.memory)

    def choice_on(self, machine: Machine) -> Choice:
        """Returns the plan on a machine, which has to be the one of the workers.

        Raises:
            PlanError: No plan fits, or a given plan is for another number of devices.
        """
        task = self.task_on(machine)
        return _choose(task, self.limit_bytes(machine, task), self.given)

    def compiled_if_it_paid(self, session: Session, machine: Machine, choice: Choice) -> tuple[Choice, list[str]]:
        """Returns the plan, with compiled blocks if they paid in earlier runs, and what the log says of that.

        A script that asks for `autotune` has them tried anew.
        """
        if choice.is_forced or self.options.autotune or not may_compile(self.root, choice.plan, session.device_type):
            return choice, []
        found = measured(machine.key, self.model_name, self.rows, choice.plan)
        if found is None or not found.pays:
            return choice, []
        compiled = replace(choice.chosen, plan=choice.plan.with_compiled_blocks())
        ranking = replace(choice.ranking, candidates=(compiled, *choice.candidates[1:]))
        return replace(choice, ranking=ranking), [log.compiled_before_line(found.compiled_s, found.written_s)]

    def tries_compiled(self, session: Session, machine: Machine, choice: Choice) -> bool:
        """Returns whether compiled blocks are tried after the first steps, as `compiled_runs.py` does."""
        plan = choice.plan
        is_open = not choice.is_forced and not self.options.autotune and plan.tensor == plan.pipeline == 1
        if not is_open or plan.micro_batches > 1 or not compiles_quickly(session.device_type):
            return False
        if draws_random_numbers(self.root)() or joins_rows(self.root):
            return False
        if not may_compile(self.root, plan, session.device_type):
            return False
        return measured(machine.key, self.model_name, self.rows, plan) is None

    def limited_task_on(self, machine: Machine | None, otherwise: Corrections = UNCORRECTED) -> Task | None:
        """Returns the task on a machine that is only thought of, within the memory that earlier runs found; None
        without a machine. Arguments as for `task_on`."""
        if machine is None:
            return None
        task = self.task_on(machine, otherwise)
        limit = self.limit_bytes(machine, task)
        return task.with_usable(limit) if limit < task.usable_bytes else task

    def planned(self, machine: Machine, choice: Choice) -> Planned:
        """Returns a choice with all that is known of it."""
        task = choice.ranking.task if choice.is_forced else self.task_on(machine)
        expected = Expected(machine.key, self.model_name, self.rows, choice.chosen, task.corrections)
        fitting = tuple(one for one in choice.candidates if one.fits and one.step is not None)
        return Planned(expected, task, fitting, self.family, self.options.plan is not None)


def compiles_quickly(device_type: str) -> bool:
    """Returns whether the compiler's kernels are made by Triton, on GPUs."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


def may_compile(root: nn.Module, plan: Plan, device_type: str) -> bool:
    """Returns whether blocks may be compiled though the script asks for nothing; what it asks for is left alone."""
    is_open = plan.compile == "none" and not plan.why_uncompiled and not compiled_in(root) and not declined_in(root)
    return is_open and bool(block_lists(root)) and not (device_type == "cpu" and cpp_compiler.missing())


def _choice_on_its_devices(
    session: Session, question: Question, identity: str, *, is_first: bool
) -> tuple[Machine, Choice]:
    """Returns a model's plan on the devices that it is to have, and these; restarts the workers if they are others."""
    if is_first:
        device_count.settle_start(session, identity)
    machine = machine_of(session)
    if not is_first and session.uses_fewer_devices and _moves_to_all(session, question, machine):
        machine = machine_of(session)
    choice = question.choice_on(machine)

    def task_on(count: int) -> Task | None:
        return question.limited_task_on(machine_on(session, count), choice.ranking.task.corrections)

    if device_count.use_fewer(session, question.root, identity, choice.chosen.seconds, question.rows, task_on):
        machine = machine_of(session)
        choice = question.choice_on(machine)
    return machine, choice


def _moves_to_all(session: Session, question: Question, machine: Machine) -> bool:
    """Returns whether all devices have workers now, since a second model is clearly faster on them."""
    task = question.limited_task_on(machine_on(session, session.max_devices))
    on_all = None if task is None else search(task)
    here = search(question.task_on(machine))
    here_s = here.best.seconds if here.num_fitting else float("inf")
    if on_all is None or not device_count.is_faster_on_all(here_s, on_all):
        return False
    name, count, everything = type(question.root).__name__, session.num_devices, session.max_devices
    all_s = on_all.best.seconds
    there = f"take {here_s:.3g} s a step on {count}" if here.num_fitting else f"need more memory than {count} have"
    assert session.use_all_devices is not None  # set by `Recovery`
    if session.use_all_devices(f"{name} is predicted to {there}, and {all_s:.3g} s a step on {everything}"):
        return True
    if here.num_fitting:
        logger.say(log.kept_devices_line(name, count, everything, here_s, all_s))
    return False


def _on_all(session: Session, question: Question) -> Planned | None:
    """Returns the plan that a model on fewer devices would have on all; None if none fits, or they are not known."""
    machine = machine_on(session, session.max_devices)
    task = question.limited_task_on(machine)
    ranking = None if task is None else search(task)
    if machine is None or ranking is None or not ranking.num_fitting:
        return None
    return question.planned(machine, Choice(ranking, is_forced=False))


def write_selected(plan: Plan, task: Task) -> None:
    """Writes the selected plan to its `.dump` file."""
    try:
        log.write_selected_config(plan, task.global_batch)
    except OSError as error:  # the plan is in the log too
        logger.say(f"the selected plan cannot be written to a file: {error}")


def _choose(task: Task, limit_bytes: float, given: Plan | None) -> Choice:
    """Returns a plan within the limit of earlier runs of the model; without the limit if no plan fits into it."""
    if given is None and limit_bytes < task.usable_bytes:
        try:
            return choose_plan(task.with_usable(limit_bytes))
        except PlanError:
            logger.say("plans of this model ran out of memory before, and none needs less: tried again")
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
        host_bytes=memory_limit() / machine.cluster.devices_per_node,
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
