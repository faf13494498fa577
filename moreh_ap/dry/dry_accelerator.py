"""An accelerator without workers, on which a script runs up to its first call of a model, and the plan of that call.

Decides which devices it pretends to have, and what is known of the call. Must not know how a script is run and left.

[Note: this machine]
Where no devices are named, the plan is for the devices of this machine, as the script would have them: the workers
start, are described and measured as in any run, and end, before the script goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moreh_ap import device
from moreh_ap.accelerator import enabling, redirection
from moreh_ap.accelerator.worker_starts import WorkerStarts, resolve_devices
from moreh_ap.dry.absent_workers import AbsentWorkers, UnlistedJob
from moreh_ap.dry.unloaded import without_memory
from moreh_ap.errors import OptionError
from moreh_ap.integrations import transformers_dry
from moreh_ap.patching import PatchGroup
from moreh_ap.planner.cost.coefficients import COEFFICIENTS
from moreh_ap.planner.cost.hardware import Cluster
from moreh_ap.planner.cost.training_systems import MOREH_AP
from moreh_ap.planner.profiles.transformer_shape import TransformerShape
from moreh_ap.planner.search import verified_kinds
from moreh_ap.planner.search.choice import Choice
from moreh_ap.planner.search.device_counts import faster_on_fewer
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.ranking import Ranking
from moreh_ap.protocol.messages.devices import DeviceInfo
from moreh_ap.session.model_registry import ModelRegistry
from moreh_ap.session.own_process.small_models import SmallModels
from moreh_ap.session.planning import device_count_records
from moreh_ap.session.planning.first_call import family_of, rows_of
from moreh_ap.session.planning.machine_profile import Machine, machine_of, machine_on
from moreh_ap.session.planning.model_profiling import has_items, profile_model, shape_of
from moreh_ap.session.planning.plan_selection import Question
from moreh_ap.session.rng_streams import ProcessGenerator
from moreh_ap.session.session import Session
from moreh_ap.settings import Options


@dataclass(frozen=True)
class _Place:
    """Devices that a script would have.

    Attributes:
        device_type: "cuda" or "cpu".
        info: Name, memory and compute capability that the script reads of each device.
        machine: All of them, for the planner.
        fewer: Smaller numbers of them, each as far as it is known.
    """

    device_type: str
    info: DeviceInfo
    machine: Machine
    fewer: Callable[[int], Machine | None]


class DryAccelerator:
    """Makes "cuda" mean devices that need not be there, until a model is called.

    Args:
        options: What the script asked for.
        cluster: The devices; None: those of this machine.
        with_weights: Whether the parameters of modules have their values.
        note: Is told what was left out.

    Raises:
        OptionError: The script asks for more devices than were named, or for other machines.
    """

    def __init__(
        self, options: Options, cluster: Cluster | None, with_weights: bool, note: Callable[[str], object]
    ) -> None:
        self.options = options
        self.place = _this_machine(options) if cluster is None else _named(options, cluster)
        count = self.place.machine.cluster.num_devices

        def no_workers(num_devices: int, past: object) -> AbsentWorkers:
            return AbsentWorkers(self.place.info, num_devices, self.place.device_type)

        self.session = Session(options, no_workers, count, count, UnlistedJob(), ProcessGenerator())
        self.models = ModelRegistry(self.session)
        self._patches = redirection.redirect(self.session, self.models)
        transformers_dry.install(self._patches, note, without_weights=not with_weights)
        if not with_weights:
            _leave_weights_out(self._patches.group("A dry run needs shapes, and no weights."))

    def in_use(self) -> bool:
        """Returns False: a script is left before a model moves to workers."""
        return False

    def has_ended(self) -> bool:
        """Returns False: there are no workers that could be lost."""
        return False

    def close(self) -> None:
        """Undoes the redirections."""
        self._patches.undo()


@contextlib.contextmanager
def dry(cluster: Cluster | None, note: Callable[[str], object], *, with_weights: bool) -> Iterator[list[Options]]:
    """Inside, the one line makes a `DryAccelerator`; arguments as for that. Yields the options of each, so far none."""
    before = enabling.MAKES.make
    made: list[Options] = []

    def make(options: Options) -> DryAccelerator:
        made.append(options)
        return DryAccelerator(options, cluster, with_weights, note)

    enabling.MAKES.make = make
    try:
        yield made
    finally:
        enabling.MAKES.make = before


def _leave_weights_out(group: PatchGroup) -> None:
    register = nn.Module.register_parameter
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # what is shared stays shared

    def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Registers a parameter of the same shape without numbers."""
        if type(parameter) is nn.Parameter and parameter.device.type == "cpu" and not parameter.is_sparse:
            if id(parameter) not in made:
                made[id(parameter)] = (parameter, without_memory(parameter))
            parameter = made[id(parameter)][1]
        register(module, name, parameter)

    group.replace(nn.Module, "register_parameter", register_parameter)


def _named(options: Options, cluster: Cluster) -> _Place:
    asked = options.devices
    if asked is not None and asked > cluster.num_devices:
        raise OptionError(
            f"the script, or MOREH_NUM_DEVICES, asks for {asked} devices, and {cluster.num_devices} were named",
            f"{asked} devices or more, or a script that leaves the number open",
            f"moreh-ap plan --devices {asked}x{cluster.device.name} train.py",
            "docs/dry-run.md#devices",
        )

    def on(count: int) -> Machine:
        part = replace(cluster, num_devices=count, devices_per_node=min(cluster.devices_per_node, count))
        return Machine(part, MOREH_AP, COEFFICIENTS, f"{count} x {cluster.device.name}, named")

    info = DeviceInfo(cluster.device.name, int(cluster.device.memory_bytes), cluster.device.native_bf16)
    return _Place("cuda", info, on(asked or cluster.num_devices), on)


def _this_machine(options: Options) -> _Place:
    """See [Note: this machine]."""
    if options.hosts:
        raise OptionError(
            f"the script names {len(options.hosts)} hosts, which a dry run does not join",
            "--devices with those of each host, and --hosts with their number",
            f"moreh-ap plan --devices 8xH100-80GB --hosts {len(options.hosts)} train.py",
            "docs/dry-run.md#devices",
        )
    _, count = resolve_devices(options.devices)
    alone = replace(options, devices=count, trace_file="", report_folder="", check_steps=0, recovery="off", plan=None)
    real = redirection.Accelerator(alone, WorkerStarts(alone))
    try:
        session = real.session
        machine, info = machine_of(session), session.devices()[0]
        fewer = {less: machine_on(session, less) for less in range(1, count)}
        return _Place(session.device_type, info, machine, fewer.get)
    finally:
        real.close()


# -- the first call ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstCall:
    """What is known of a script's first call of a model on the accelerator.

    Attributes:
        question: What the planner is asked.
        place: The devices.
        session: Without workers.
        own_process: The line that says why the model would run in the script's own process; "" on workers.
        trains: Whether gradients are wanted.
    """

    question: Question
    place: _Place
    session: Session
    own_process: str
    trains: bool

    @property
    def shape(self) -> TransformerShape | None:
        """The model's shape, if it is a decoder of transformers."""
        return self.question.shape


def note_first_call(root: nn.Module, call: tuple[nn.Module, Any, Any]) -> FirstCall:
    """Returns what is known of a call under a `DryAccelerator`, which is in force."""
    dry_one: DryAccelerator = device.current()
    shape, rows = shape_of(root), rows_of(call) or 1
    profile, with_items = profile_model(root, shape, call, rows), has_items(call, rows_of(call))
    question = Question(dry_one.options, root, family_of(root), profile, shape, rows, with_items)
    trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in root.parameters())
    own_process = SmallModels(dry_one.session, {}).why_here(root, call[1:])
    return FirstCall(question, dry_one.place, dry_one.session, own_process, trains)


@dataclass(frozen=True)
class DryPlan:
    """The plan of a first call.

    Attributes:
        choice: The plan on all devices, with the others.
        fewer: The plans on the smaller number of devices that the script would use; None: it would use all.
        notes: What else a run would do, or would have to know; a sentence each.
    """

    choice: Choice
    fewer: Ranking | None
    notes: tuple[str, ...]


def plan_of(first: FirstCall) -> DryPlan:
    """Returns the plan that a run would have.

    Raises:
        PlanError: No plan fits, or the script's plan is for another number of devices.
    """
    question, place, machine = first.question, first.place, first.place.machine
    choice = question.choice_on(machine)
    fewer = None
    if first.trains and question.options.devices is None and question.options.plan is None:

        def task_on(count: int) -> Task | None:
            return question.limited_task_on(place.fewer(count), choice.ranking.task.corrections)

        least = device_count_records.LEAST_DEVICES[place.device_type]
        count = machine.cluster.num_devices
        fewer = faster_on_fewer(choice.chosen.seconds, count, question.rows, task_on, least)
    if fewer is None:
        choice, _ = question.compiled_if_it_paid(first.session, machine, choice)
    plan = choice.plan if fewer is None else fewer.best.plan
    return DryPlan(choice, fewer, tuple(_notes(first, plan)))


def _notes(first: FirstCall, plan: Any) -> Iterator[str]:
    question = first.question
    name = type(question.root).__name__
    if first.own_process:
        yield f"A run without a plan of its own leaves this model where it is: {first.own_process}."
    if not first.trains:
        yield f"The first call of {name} asks for no gradients: the plan is chosen at that call all the same."
    if verified_kinds.kinds_to_verify(plan) and not verified_kinds.is_verified(question.family, plan):
        yield f"The plan is not verified for {name}: a run trains a small copy under it first, and refuses it if wrong."
    if question.options.devices is not None and question.options.plan is None:
        yield f"The script, or MOREH_NUM_DEVICES, asks for {question.options.devices} devices."
    if question.options.plan is not None:
        yield f'The script gives the plan: plan="{question.options.plan}".'
