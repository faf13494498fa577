"""`moreh-switch-model`: another model of the current accelerator, so another number of devices for the next process.

Decides how that is asked and answered. Must not know what a model is: that is `accelerator_models.py`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

from moreh_ap import accelerator_models
from moreh_ap.accelerator_models import Supply
from moreh_ap.toolkit import prompts, smi_tables
from moreh_ap.toolkit.machine_inventory import look

DONE = 'The {name} model is successfully switched to  "{model}".'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status.

    Args:
        arguments: What follows the program's name; default: the process's own.
    """
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    if sum(map(bool, (chosen.model, chosen.option, chosen.all, chosen.list))) > 1:
        parser.error("one of MODEL, -M, --all and --list")
    return prompts.run_tool(lambda: _run(chosen.model or chosen.option, chosen.all, chosen.list))


def make_parser() -> argparse.ArgumentParser:
    """Returns what reads the arguments."""
    parser = argparse.ArgumentParser(
        prog="moreh-switch-model",
        description="Choose the model of the current accelerator: how many devices the next process takes.",
        epilog="Without MODEL it lists the models and asks. Running processes keep what they have.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="its number in the list, or its name")
    parser.add_argument("-M", "--model", dest="option", metavar="MODEL", help="the same")
    parser.add_argument("--all", action="store_true", help="forget the choice: all devices of the machine")
    parser.add_argument("--list", action="store_true", help="print the list and end")
    return parser


def _run(wanted: str | None, of_all: bool, only_list: bool) -> int:
    supply = look().supply
    if of_all:
        accelerator_models.save(supply.device_type, accelerator_models.load(supply.device_type).with_model(""))
        print(DONE.format(name=smi_tables.NAME, model=accelerator_models.model_of_all(supply)))
        return 0
    if wanted is not None:
        print(DONE.format(name=smi_tables.NAME, model=_switch(wanted, supply)))
        return 0
    print(f"Current {smi_tables.NAME}: {_current(supply)}\n\n{_list(supply)}\n")
    return 0 if only_list else _ask(supply)


def _ask(supply: Supply) -> int:
    """Asks until the answer is ``q`` or input ends.

    Raises:
        EOFError: Input ended before anything was chosen.
    """
    for done in itertools.count():
        last = len(accelerator_models.models_of(supply, _current(supply)))
        try:
            name = prompts.ask(1, last, lambda answer: _switch(answer, supply))
        except EOFError:
            if done:
                break
            raise
        if name is None:
            break
        print(f"{DONE.format(name=smi_tables.NAME, model=name)}\n\n{_list(supply)}\n")
    return 0


def _switch(wanted: str, supply: Supply) -> str:
    """Keeps a model and returns its name.

    Raises:
        OptionError: There is no such model, or it has too many devices.
    """
    accelerators = accelerator_models.load(supply.device_type)
    name = accelerator_models.find_model(wanted, supply, _current(supply))
    accelerator_models.save(supply.device_type, accelerators.with_model(name))
    return name


def _current(supply: Supply) -> str:
    return accelerator_models.load(supply.device_type).model or accelerator_models.model_of_all(supply)


def _list(supply: Supply) -> str:
    current = _current(supply)
    return prompts.numbered(accelerator_models.models_of(supply, current), current, supply.most_devices)


if __name__ == "__main__":
    sys.exit(main())
