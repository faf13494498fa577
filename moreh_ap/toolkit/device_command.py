"""`moreh-smi device`: accelerators are added, removed, and made the current one.

Decides how that is asked and answered. Must not know what a model is, nor what runs beyond who uses an accelerator.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from moreh_ap import accelerator_models
from moreh_ap.accelerator_models import MOST_ACCELERATORS, Accelerators, Supply
from moreh_ap.errors import OptionError
from moreh_ap.local.jobs import running_jobs
from moreh_ap.toolkit import prompts, smi_tables
from moreh_ap.toolkit.machine_inventory import look

_LINK = "docs/toolkit.md#several-accelerators"


def add_arguments(commands: Any) -> None:
    """Adds the command to the program's parser."""
    parser = commands.add_parser(
        "device",
        help="list models; add, remove or choose accelerators",
        description="Accelerators are models that are set up beside each other; the next process takes the current "
        "one. Where ID is left out, it is asked for.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="the models that can be added")
    what.add_argument("--add", nargs="?", const="", metavar="ID", help="add an accelerator of this model")
    what.add_argument("--rm", nargs="?", const="", metavar="ID", help="remove an accelerator")
    what.add_argument("--switch", nargs="?", const="", metavar="ID", help="make an accelerator the current one")


def run(arguments: argparse.Namespace) -> int:
    """Does what was asked and returns the exit status.

    Raises:
        OptionError: There is no such model or accelerator, or it cannot be added or removed.
        EOFError: An answer is needed, and standard input is closed or at its end.
    """
    supply = look().supply
    accelerators = accelerator_models.load(supply.device_type)
    if arguments.list:
        print(_list_of_models(supply, accelerators))
        return 0
    if arguments.add is not None:
        changed, said = _added(arguments.add, supply, accelerators), "Create device success."
    elif arguments.rm is not None:
        changed, said = _removed(arguments.rm, supply, accelerators), "Remove device success."
    else:
        changed, said = _switched(arguments.switch, supply, accelerators), "Switch Current device success."
    if changed is not None:
        accelerator_models.save(supply.device_type, changed)
        smi_tables.console().print(smi_tables.listed(changed, accelerator_models.model_of_all(supply)))
        print(said)
    return 0


def find_accelerator(text: str, accelerators: Accelerators) -> int:
    """Returns the number of an accelerator.

    Raises:
        OptionError: There is none with that number.
    """
    numbers = [str(number) for number in accelerators.models]
    if text.strip() not in numbers:
        raise OptionError(f"there is no accelerator {text.strip()!r}", ", ".join(numbers), "moreh-smi", _LINK)
    return int(text)


def _added(text: str, supply: Supply, accelerators: Accelerators) -> Accelerators | None:
    if len(accelerators.models) >= MOST_ACCELERATORS:
        raise OptionError(
            f"there are {len(accelerators.models)} accelerators",
            f"at most {MOST_ACCELERATORS}",
            f"moreh-smi device --rm {max(accelerators.models)}",
            _LINK,
        )
    if not text:
        print(f"{_list_of_models(supply, accelerators)}\n")
        last = len(accelerator_models.models_of(supply))
        name = prompts.ask(1, last, lambda answer: accelerator_models.find_model(answer, supply))
    else:
        name = accelerator_models.find_model(text, supply)
    if name is None:
        return None
    number = min(set(range(MOST_ACCELERATORS)) - set(accelerators.models))
    return replace(accelerators, models=dict(sorted({**accelerators.models, number: name}.items())))


def _removed(text: str, supply: Supply, accelerators: Accelerators) -> Accelerators | None:
    number = _number(text, supply, accelerators)
    if number is None:
        return None
    if len(accelerators.models) == 1:
        raise OptionError(f"accelerator {number} is the only one", "another beside it", "moreh-smi device --add", _LINK)
    jobs = [job.job_id for job in running_jobs() if job.accelerator == number and job.device_type == supply.device_type]
    if jobs:
        raise OptionError(
            f"accelerator {number} is in use by job {', '.join(jobs)}",
            "an accelerator that no job uses",
            f"moreh-smi -i {number} --reset",
            _LINK,
        )
    models = {other: name for other, name in accelerators.models.items() if other != number}
    return Accelerators(min(models) if number == accelerators.current else accelerators.current, models)


def _switched(text: str, supply: Supply, accelerators: Accelerators) -> Accelerators | None:
    number = _number(text, supply, accelerators)
    return None if number is None else replace(accelerators, current=number)


def _number(text: str, supply: Supply, accelerators: Accelerators) -> int | None:
    """Returns the accelerator that was named or is chosen now; None if the answer is ``q``."""
    if text:
        return find_accelerator(text, accelerators)
    smi_tables.console().print(smi_tables.listed(accelerators, accelerator_models.model_of_all(supply)))
    numbers = sorted(accelerators.models)
    return prompts.ask(numbers[0], numbers[-1], lambda answer: find_accelerator(answer, accelerators))


def _list_of_models(supply: Supply, accelerators: Accelerators) -> str:
    return prompts.numbered(accelerator_models.models_of(supply), "", supply.most_devices)
