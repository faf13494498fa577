"""`moreh-ap verify`: whether plans give a model the numbers of one process, as a table.

Decides what is verified and how the outcome is shown. Must not know how numbers are compared: that is
`session.equivalence`. The workers are processes on the CPU, whatever devices the machine has.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moreh_ap.errors import OptionError, PlanError
from moreh_ap.plan import Plan

if TYPE_CHECKING:
    from moreh_ap.session.verification.equivalence import Equivalence, Subject, Training

DEFAULT_DEVICES, DEFAULT_LENGTH = 2, 12
COLUMNS = ("plan", "verdict", "loss", "norm", "gradient", "weight")
_WHOLE = "Every device computes the whole batch"

Prepared = tuple["Subject", "Training"]


def add_arguments(commands: Any) -> None:
    """Adds the command to the program's parser."""
    parser = commands.add_parser(
        "verify",
        help="train a small copy of a model under each plan and in one process, and compare",
        description=__doc__.split("\n\n")[0],
        epilog="Arguments of a script follow after --. The exit status is 0 if every plan is proven, else 1.",
    )
    parser.add_argument("model", metavar="SCRIPT_OR_MODEL", help="a .py file with the one line; a folder with a "
                        "config.json, or that file; or the name of a family")  # fmt: skip
    parser.add_argument("--plans", nargs="+", metavar="PLAN", help='such as "shard=2" "tensor=2"')
    parser.add_argument("--devices", type=int, metavar="N", default=DEFAULT_DEVICES,
                        help=f"devices of the plans where none are given (default {DEFAULT_DEVICES})")  # fmt: skip
    parser.add_argument("--rows", type=int, metavar="R", help="rows of a batch (default: what the plans need)")
    parser.add_argument("--seq-len", type=int, metavar="T", default=DEFAULT_LENGTH,
                        help=f"positions of a row where there is no script (default {DEFAULT_LENGTH})")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--allow-refused", action="store_true", help="a plan that is refused is no failure")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, script_arguments: list[str]) -> int:
    """Verifies, prints the table and returns the exit status.

    Raises:
        MorehError: A plan cannot be read, or the model or script gives nothing to verify.
    """
    for name, least in (("devices", 1), ("rows", 1), ("seq_len", 3)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} {value}", f"at least {least}", f"moreh-ap verify ... {option} {least}")
    plans = [Plan.parse(text) for text in arguments.plans or default_plans(arguments.devices)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the workers are on the CPU; torch is not imported yet
    if arguments.model.endswith(".py"):
        prepare = _from_script(arguments, script_arguments, plans)
    else:
        prepare = _from_model(arguments, plans)
    found = verify_plans(plans, prepare)
    print_table(arguments.model, found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([_plain(one) for one in found], indent=1) + "\n", encoding="utf-8")
    accepted = {"proven", "refused"} if arguments.allow_refused else {"proven"}
    return 0 if all(one.verdict in accepted for one in found) else 1


def default_plans(num_devices: int) -> list[str]:
    """Returns a plan of every kind for so many devices."""
    if num_devices == 1:
        return ["replicate=1,micro_batches=2", "replicate=1,recompute=full"]
    return [
        f"replicate={num_devices}",
        f"shard={num_devices}",
        f"shard={num_devices},micro_batches=2",
        f"shard={num_devices},recompute=full",
        f"tensor={num_devices}",
        f"pipeline={num_devices},micro_batches={2 * num_devices}",
    ]


def verify_plans(plans: list[Plan], prepare: Callable[[int], Prepared]) -> list[Equivalence]:
    """Returns what was found for each plan, in the order given; workers start once for each number of devices.

    Args:
        prepare: Gives, for a number of blocks, the small model and what one process makes of it.
    """
    from moreh_ap import device

    found: dict[Plan, Equivalence] = {}
    try:
        for plan in sorted(set(plans), key=lambda plan: plan.num_devices):
            print(f"{plan} ...", flush=True)
            found[plan] = _verify_plan(plan, prepare)
    finally:
        device.disable()
    return [found[plan] for plan in plans]


def _verify_plan(plan: Plan, prepare: Callable[[int], Prepared]) -> Equivalence:
    from moreh_ap import device
    from moreh_ap.accelerator import enable
    from moreh_ap.session.planning import first_call
    from moreh_ap.session.verification import equivalence, reduced_model
    from moreh_ap.settings import Options

    subject, expected = prepare(reduced_model.depth_for(plan))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # the start of the workers, once for every plan, is not what was asked for
        accelerator = device.current()
        if accelerator is None or accelerator.session.num_devices != plan.num_devices:
            device.disable()
            enable(Options(devices=plan.num_devices, plan=plan, mixed_precision=False))
            accelerator = device.current()
        try:
            with first_call.on_trial(plan):
                found = equivalence.measure(subject, expected, plan)
        except PlanError as error:
            return equivalence.Equivalence(str(plan), "refused", error.fact)
        except Exception as error:  # of any kind: whatever the model or a worker raised is this plan's outcome
            device.disable()  # its workers may be lost; the next plan starts its own
            first_line = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            return equivalence.Equivalence(str(plan), "failed", first_line)
        finally:
            current = device.current()
            if current is not None:
                current.session.synchronize()
    if _WHOLE in said.getvalue() and found.proven and plan.data_parallel * plan.micro_batches > 1:
        return replace(found, reason="every device computes the whole batch")
    return found


def print_table(model: str, found: list[Equivalence]) -> None:
    """Prints a row for each plan; below the table where its numbers were worst, or why it is not proven."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model}: largest relative difference from one process", title_justify="left", pad_edge=False)
    for column in COLUMNS:
        is_text = column in ("plan", "verdict")
        table.add_column(
            column, justify="left" if is_text else "right", no_wrap=column != "plan", min_width=7, overflow="fold"
        )
    notes = []
    for one in found:
        plan, verdict, loss, norm, gradient, gradient_name, weight, weight_name = one.row()
        table.add_row(plan, verdict, loss, norm, gradient, weight)
        if gradient_name:
            notes.append(f"{plan}: the worst gradient is {gradient_name}, the worst weight {weight_name}")
        if one.reason:
            notes.append(f"{plan}: {verdict}: {one.reason}")
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _plain(found: Equivalence) -> dict[str, Any]:
    """The result as JSON can say it: no number where nothing was measured."""
    return {name: None if value != value else value for name, value in asdict(found).items()}


# -- what is verified --------------------------------------------------------------------------------------------------


def _rows(arguments: argparse.Namespace, plans: list[Plan]) -> int:
    from moreh_ap.session.verification import reduced_model

    return int(arguments.rows or max(reduced_model.rows_for(plan) for plan in plans))


def _from_model(arguments: argparse.Namespace, plans: list[Plan]) -> Callable[[int], Prepared]:
    """How to get a family's small model.

    Raises:
        OptionError: There is no such family, folder or configuration.
    """
    from moreh_ap.integrations import transformers_families
    from moreh_ap.session.verification import equivalence, reduced_model

    rows, prepared = _rows(arguments, plans), {}

    def prepare(depth: int) -> Prepared:
        if depth not in prepared:
            try:
                module, calls = transformers_families.model_and_calls(
                    arguments.model, rows, arguments.seq_len, depth, equivalence.STEPS
                )
                subject = reduced_model.subject_of(module, calls)
                prepared[depth] = (subject, equivalence.reference(subject))
            except Exception as error:  # of any kind: transformers' own model did not take what it was given
                raise OptionError(
                    f"a small {arguments.model} does not train in one process: {type(error).__name__}: {error}",
                    "a model whose forward takes input_ids, attention_mask and labels; for others, a script",
                    "moreh-ap verify train.py",
                ) from error
        return prepared[depth]

    try:
        transformers_families.configuration_of(arguments.model)
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(
            f"{arguments.model} is no model that can be verified: {type(error).__name__}: {error}",
            f"a script, a folder with a config.json, or one of {', '.join(transformers_families.FAMILIES)}",
            "moreh-ap verify llama",
        ) from error
    return prepare


def _from_script(
    arguments: argparse.Namespace, script_arguments: list[str], plans: list[Plan]
) -> Callable[[int], Prepared]:
    """How to get the small copy of a script's model: everything is copied before the script is left.

    Raises:
        OptionError: The script ends without calling a model on the accelerator.
    """
    from moreh_ap.cli import script
    from moreh_ap.session.verification import reduced_model

    rows, depths = _rows(arguments, plans), {reduced_model.depth_for(plan) for plan in plans}

    def copy_call(root: Any, call: Any) -> dict[int, Prepared]:
        return {depth: reduced_model.reduce_call(root, call, rows, depth) for depth in depths}

    prepared = script.run_until_first_call(Path(arguments.model), script_arguments, copy_call)
    return prepared.__getitem__
