"""`moreh-ap verify`: whether plans give a model the numbers of one process, as a table.

Decides what is verified and how the outcome is shown. Must not know how numbers are compared: that is
`session/verification/equivalence.py`. The workers are processes on the CPU, whatever devices the machine has.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from moreh_ap.errors import OptionError
from moreh_ap.plan import Plan

if TYPE_CHECKING:
    from moreh_ap.session.verification.equivalence import Equivalence

DEFAULT_DEVICES, DEFAULT_LENGTH = 2, 12
COLUMNS = ("plan", "verdict", "loss", "norm", "gradient", "weight")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = __doc__.split("\n\n")[0]
    parser.epilog = "Arguments of a script follow after --. The exit status is 0 if every plan is verified, else 1."
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
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the workers are on the CPU
    from moreh_ap.cli import plan_verification  # imports torch, which has to find the variable as it is now

    rows = plan_verification.num_rows_for(plans, arguments.rows)
    if arguments.model.endswith(".py"):
        prepare = plan_verification.from_script(Path(arguments.model), script_arguments, plans, rows)
    else:
        prepare = plan_verification.from_model(arguments.model, rows, arguments.seq_len)
    found = plan_verification.verify_plans(plans, prepare)
    print_table(arguments.model, found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([_plain(one) for one in found], indent=1) + "\n", encoding="utf-8")
    accepted = {"verified", "refused"} if arguments.allow_refused else {"verified"}
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


def print_table(model: str, found: list[Equivalence]) -> None:
    """Prints a row for each plan; below the table where its numbers were worst, or why it is not verified."""
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
