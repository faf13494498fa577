"""`moreh-ap plan`: which plan a model or a script gets on given devices, how much memory and time it takes, and why.

Decides what is asked of the planner and in which form the answer is shown. Must not know how a plan is found. For a
model nothing is started and nothing downloaded: it is a configuration or one of a list. A script runs up to its first
call, in a process of its own (`plan_script.py`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from moreh_ap.cli.plan_output import plan_json, plan_pictures, plan_tables
from moreh_ap.cli.plan_process import in_a_process
from moreh_ap.errors import OptionError, PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import Cluster, find_cluster, find_device
from moreh_ap.planner.cost.training_systems import MOREH_AP
from moreh_ap.planner.profiles.adapters import FROZEN_WEIGHTS, adapters_of, with_adapters
from moreh_ap.planner.profiles.known_models import find_model, shape_from_file
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.planner.search.candidate import Candidate, evaluate_plan
from moreh_ap.planner.search.constraints import ALL_KINDS, Constraints, for_packed_weights
from moreh_ap.planner.search.device_counts import faster_on_fewer
from moreh_ap.planner.search.no_fit_error import fewest_devices
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.ranking import Ranking
from moreh_ap.planner.search.search_space import tensor_degrees_of

DEFAULT_LENGTH, DEFAULT_TOP, DEFAULT_RATIO = 1024, 5, 80

Choice = Literal["auto"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = __doc__.split("\n\n")[0]
    parser.epilog = (
        "Arguments of a script follow its name; options of this command stand before it, or all before a --. "
        "The exit status is 0 if a plan fits, else 2."
    )
    parser.add_argument("model", metavar="MODEL_OR_SCRIPT", nargs="?",
                        help="a folder with a config.json, that file, a public model's name, or a .py file with the "
                        "one line")  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.json, instead of MODEL")
    where = parser.add_argument_group("devices")
    where.add_argument("--devices", metavar="NxDEVICE",
                       help="such as 64xMI250 or 8xH100; a device alone is one node; with a script, default: this "
                       "machine's")  # fmt: skip
    where.add_argument("--hosts", type=int, metavar="N", help="hosts with --devices each (default: as --devices says)")
    where.add_argument("--hardware", metavar="DEVICE", help="such as h100, with --nodes")
    where.add_argument("--nodes", type=int, metavar="N", help="nodes of --hardware (default 1)")
    where.add_argument("--devices-per-node", type=int, metavar="N", help="default: what such nodes usually have")
    where.add_argument("--link", default="", metavar="LINK", help="between nodes; default: the device's usual one")
    batch = parser.add_argument_group("batch")
    batch.add_argument("--global-batch", type=int, metavar="ROWS", help="rows of a step (default: one a device)")
    batch.add_argument("--seq-len", type=int, default=DEFAULT_LENGTH, metavar="T",
                       help=f"positions of a row (default {DEFAULT_LENGTH})")  # fmt: skip
    trained = parser.add_argument_group("what is trained")
    trained.add_argument("--lora", type=int, metavar="RANK",
                         help="adapters of that rank beside all matrices of blocks; the rest is frozen")  # fmt: skip
    forms = sorted(FROZEN_WEIGHTS)
    trained.add_argument("--frozen", choices=forms, metavar="|".join(forms),
                         help="how frozen weights are kept, with --lora (default bf16)")  # fmt: skip
    options = parser.add_argument_group("what the one line's arguments allow")
    options.add_argument("--no-pipeline", action="store_true", help="pipeline_parallel=False")
    options.add_argument("--num-stages", type=_count_or_auto, default="auto", metavar="N", help="at most so many")
    options.add_argument("--num-micro-batches", type=_count_or_auto, default="auto", metavar="N", help="that number")
    options.add_argument("--activation-recomputation", type=_truth_or_auto, default="auto", metavar="true|false|auto",
                         help="true: every block; false: none")  # fmt: skip
    options.add_argument("--distribute-parameter", type=_truth_or_auto, default="auto", metavar="true|false|auto",
                         help="true: shard over the devices that share the batch; false: never")  # fmt: skip
    options.add_argument("--no-mixed-precision", action="store_true", help="compute in float32")
    options.add_argument("--memory-ratio", type=int, default=DEFAULT_RATIO, metavar="PERCENT",
                         help=f"per cent of a device that a plan may fill (default {DEFAULT_RATIO})")  # fmt: skip
    options.add_argument("--kinds", nargs="*", metavar="KIND", default=sorted(ALL_KINDS),
                         help=f"kinds of parallelism that may be used: {' '.join(sorted(ALL_KINDS))}")  # fmt: skip
    script = parser.add_argument_group("a script")
    script.add_argument("--with-weights", action="store_true", help="give its modules their weights, in this "
                        "machine's memory, for a script that computes with them before its first call")  # fmt: skip
    script.add_argument("--show-output", action="store_true", help="show what it prints, secrets included")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--top", type=int, default=DEFAULT_TOP, metavar="N", help=f"plans (default {DEFAULT_TOP})")
    shown.add_argument("--explain", action="store_true", help="why: where memory and time go, and what others lack")
    shown.add_argument("--compare", nargs="+", metavar="PLAN", help="these plans side by side, instead of the search")
    shown.add_argument("--picture", nargs="?", const="", metavar="FILE.png",
                       help="memory of every stage and the pipeline's timeline, here or as an image")  # fmt: skip
    shown.add_argument("--json", action="store_true", help="everything as one JSON object")
    parser.set_defaults(run=run, of_a_model=_of_a_model(parser))


def _of_a_model(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Returns the defaults of the options that a script's own lines answer."""
    names = (
        *("config", "global_batch", "seq_len", "lora", "frozen", "no_pipeline", "num_stages", "num_micro_batches"),
        *("activation_recomputation", "distribute_parameter", "no_mixed_precision", "memory_ratio", "kinds", "compare"),
    )
    return {name: parser.get_default(name) for name in names}


def run(arguments: argparse.Namespace, script_arguments: list[str]) -> int:
    """Plans, shows the result and returns the exit status.

    Raises:
        MorehError: Model, devices or options are impossible, or no plan fits.
    """
    for name in ("hosts", "nodes", "devices_per_node", "global_batch", "seq_len", "top"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} {value}", "at least 1", f"moreh-ap plan ... {option} 1")
    if not 1 <= arguments.memory_ratio <= 100:
        raise OptionError(
            f"--memory-ratio {arguments.memory_ratio}", "from 1 to 100", f"--memory-ratio {DEFAULT_RATIO}"
        )
    picture = Path(arguments.picture) if arguments.picture else None
    if picture is not None and (picture.suffix.lower() != ".png" or not picture.resolve().parent.is_dir()):
        raise OptionError(f"--picture {picture}", "a .png file in a folder that exists", "--picture plan.png")
    if arguments.model is not None and arguments.model.endswith(".py"):
        return _of_script(arguments, script_arguments)
    if script_arguments:
        raise OptionError(f"arguments after --: {' '.join(script_arguments)}", "none: no script is run")
    shape, cluster = shape_of(arguments), cluster_of(arguments)
    task = task_of(arguments, shape, cluster)
    if arguments.compare:
        _compare(arguments, task, picture)
        return 0
    ranking, notes = search(task), too_long(shape, arguments.seq_len)
    try:
        best = ranking.best
    except PlanError as error:
        raise _of_the_command(error, task, notes) from None
    show(arguments, ranking, _on_fewer(task, shape, best), notes)
    return 0


def _of_the_command(error: PlanError, task: Task, notes: list[str]) -> PlanError:
    """Returns the error where no plan fits with a flag to paste in place of a script's line, and with the notes."""
    devices = fewest_devices(task)
    flag = f"--devices {shlex.quote(f'{devices}x{task.cluster.device.name}')}" if devices else ""
    return PlanError(". ".join((error.fact, *notes)), error.allowed, flag, error.link)


def _of_script(arguments: argparse.Namespace, script_arguments: list[str]) -> int:
    """Shows the plan of a script, from a process of its own, and returns its exit status.

    Raises:
        OptionError: An option says what the script itself says.
    """
    options = vars(arguments).copy()
    given = [name for name, default in options.pop("of_a_model").items() if options[name] != default]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise OptionError(
            f"{flags} with a script, whose own lines say it",
            "the script's own arguments, after its name, and those of the one line in it",
            f"moreh-ap plan --devices 8xH100 {arguments.model}",
            "docs/dry-run.md",
        )
    del options["run"]
    own = {f"--{name.replace('_', '-')}" for name in options}
    if taken := [one for one in script_arguments if one.partition("=")[0] in own]:
        print(f"{arguments.model} gets {', '.join(taken)}: options of moreh-ap plan stand before it", file=sys.stderr)
    return in_a_process(options, arguments.model, script_arguments)


def show(arguments: argparse.Namespace, ranking: Ranking, fewer: Ranking | None, notes: list[str]) -> None:
    """Shows the plans of a search in the form that was asked for.

    Args:
        arguments: The command's.
        ranking: The plans on all devices.
        fewer: Those on a smaller number of devices that is faster; None if there is none.
        notes: What else is to be said, a sentence each.
    """
    if arguments.json:
        plain = {**plan_json.plain_ranking(ranking, arguments.top), "notes": notes}
        json.dump(
            {**plain, "fewer_devices": None if fewer is None else plan_json.plain_fewer(fewer)}, sys.stdout, indent=1
        )
        print()
    else:
        plan_tables.print_ranking(ranking, arguments.top)
        if fewer is not None:
            plan_tables.print_fewer(fewer, ranking)
        plan_tables.print_notes(notes)
        if arguments.explain:
            plan_tables.print_explanation(ranking)
    picture = Path(arguments.picture) if arguments.picture else None
    _draw(arguments, ranking.task, ranking.candidates[0], picture)


def too_long(shape: TransformerShape | None, positions: int) -> list[str]:
    """Returns the sentence for rows that are longer than a model takes; nothing where it takes them, or is unknown."""
    if shape is None or not 0 < shape.max_positions < positions:
        return []
    return [f"{shape.name} takes {shape.max_positions:,} positions, and a row has {positions:,}: a run would fail."]


def shape_of(arguments: argparse.Namespace) -> TransformerShape:
    """Returns the shape of the model that was asked for.

    Raises:
        OptionError: There is none, or two, or it is unknown.
    """
    fix = "moreh-ap plan Llama3-8B --devices 8xH100"
    if (arguments.model is None) == (arguments.config is None):
        said = "no model" if arguments.model is None else f"two models, {arguments.model} and {arguments.config}"
        raise OptionError(said, "MODEL or --config", fix)
    if arguments.config is not None:
        return shape_from_file(arguments.config)
    path = Path(arguments.model)
    if path.exists() or path.suffix == ".json" or arguments.model.startswith((".", "/")):
        return shape_from_file(path)
    return find_model(arguments.model).shape


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """Returns the devices that were asked for.

    Raises:
        OptionError: There are none, or they are unknown, or said twice.
    """
    if (arguments.devices is None) == (arguments.hardware is None):
        said = "no devices" if arguments.devices is None else f"--devices {arguments.devices} and --hardware"
        hosts = f"--hosts {arguments.hosts} " if arguments.hosts else ""
        raise OptionError(said, "--devices 64xMI250, or --hardware h100 --nodes 16", f"{hosts}--devices 8xH100")
    if arguments.devices is not None:
        if arguments.nodes is not None:
            raise OptionError("--devices with --nodes", "--devices with --hosts", "--hosts 2 --devices 8xH100")
        if arguments.hosts is not None:
            return _on_hosts(arguments)
        return find_cluster(arguments.devices, None, arguments.devices_per_node, arguments.link)
    if arguments.hosts is not None:
        raise OptionError("--hosts with --hardware", "--hardware with --nodes", "--hosts 2 --devices 8xH100")
    per_node = arguments.devices_per_node or find_device(arguments.hardware).devices_per_node
    return find_cluster(arguments.hardware, (arguments.nodes or 1) * per_node, per_node, arguments.link)


def _on_hosts(arguments: argparse.Namespace) -> Cluster:
    """Returns so many hosts, each with the devices that were asked for.

    Raises:
        OptionError: Devices of a node are given beside them, or the devices are unknown.
    """
    one = find_cluster(arguments.devices, None, None, arguments.link)
    if arguments.devices_per_node not in (None, one.num_devices):
        raise OptionError(
            f"--hosts {arguments.hosts} --devices {arguments.devices} --devices-per-node {arguments.devices_per_node}",
            "--devices, which are those of each host",
            f"--hosts {arguments.hosts} --devices {arguments.devices_per_node}x{one.device.name}",
        )
    return find_cluster(one.device.name, arguments.hosts * one.num_devices, one.num_devices, arguments.link)


def task_of(arguments: argparse.Namespace, shape: TransformerShape, cluster: Cluster) -> Task:
    """Returns what is to be planned, with the constraints that the flags spell.

    Models with adapters are of no family that was verified for a tensor axis or a pipeline, so that the search leaves
    these out, as it does for a script.
    """
    constraints = Constraints(
        pipeline_parallel=not arguments.no_pipeline,
        num_stages=arguments.num_stages,
        num_micro_batches=arguments.num_micro_batches,
        activation_recomputation=arguments.activation_recomputation,
        distribute_parameter=arguments.distribute_parameter,
        mixed_precision=not arguments.no_mixed_precision,
        memory_usage_correction_ratio=arguments.memory_ratio,
        kinds=frozenset(arguments.kinds) if arguments.lora is None else frozenset(),
        tensor_degrees=tensor_degrees_of(shape, cluster.num_devices),
    )
    batch = cluster.num_devices if arguments.global_batch is None else arguments.global_batch
    profile = profile_of(shape, arguments.seq_len)
    if arguments.lora is None:
        if arguments.frozen is not None:
            raise OptionError(f"--frozen {arguments.frozen} without adapters", "--lora with it", "--lora 16")
        return Task(profile, cluster, batch, constraints)
    frozen = FROZEN_WEIGHTS[arguments.frozen or "bf16"]
    if frozen.is_packed:
        constraints = for_packed_weights(constraints, None)
    profile = with_adapters(profile, adapters_of(profile, shape, arguments.lora), frozen)
    return Task(profile, cluster, batch, constraints, replace(MOREH_AP, trains_weights=False))


def _on_fewer(task: Task, shape: TransformerShape, best: Candidate) -> Ranking | None:
    """Returns the plans of a smaller number of devices that is clearly faster; None if there is none."""
    cluster = task.cluster

    def task_on(count: int) -> Task:
        smaller = replace(cluster, num_devices=count, devices_per_node=min(cluster.devices_per_node, count))
        constraints = replace(task.constraints, tensor_degrees=tensor_degrees_of(shape, count))
        return replace(task, cluster=smaller, constraints=constraints)

    return faster_on_fewer(best.seconds, cluster.num_devices, task.global_batch, task_on)


def _compare(arguments: argparse.Namespace, task: Task, picture: Path | None) -> None:
    plans = [Plan.parse(text) for text in arguments.compare]
    if task.profile.frozen is not None and task.profile.frozen.is_packed:
        for plan in plans:
            for_packed_weights(task.constraints, plan)
    candidates = [evaluate_plan(task, plan) for plan in plans]
    if arguments.json:
        plain = {**plan_json.plain_task(task), "candidates": [plan_json.plain_candidate(one) for one in candidates]}
        json.dump(plain, sys.stdout, indent=1)
        print()
    else:
        plan_tables.print_comparison(task, candidates)
    _draw(arguments, task, candidates[0], picture)


def _draw(arguments: argparse.Namespace, task: Task, candidate: Candidate, picture: Path | None) -> None:
    if arguments.picture is None or (arguments.json and picture is None):
        return
    if picture is None:
        plan_pictures.print_pictures(task, candidate)
        return
    plan_pictures.save_picture(task, candidate, picture)
    print(f"picture: {picture}", file=sys.stderr)


def _count_or_auto(text: str) -> int | Choice:
    """Returns what the flag says; `Constraints` checks that it is at least 1."""
    return "auto" if text == "auto" else int(text)


def _truth_or_auto(text: str) -> bool | Choice:
    words: dict[str, bool | Choice] = {"true": True, "false": False, "auto": "auto"}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is none of true, false, auto")
    return words[text.lower()]
