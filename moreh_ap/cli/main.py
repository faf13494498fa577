"""`moreh-ap`: the program that `pip install` puts on the path.

Decides which commands there are and how a failure ends the program. A command's module is imported only when that
command is asked for, so that most of them start without torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from moreh_ap.errors import MorehError, OptionError
from moreh_ap.version import __version__

COMMANDS = {
    "verify": (
        "moreh_ap.cli.verify_command",
        "train a small copy of a model under each plan and in one process, and compare",
    ),
    "plan": (
        "moreh_ap.cli.plan_command",
        "show which plan a model or a script gets on given devices, with its memory and time",
    ),
    "predict": ("moreh_ap.cli.predict_command", "predict memory and speed of the plans in a table of runs"),
    "evaluate": ("moreh_ap.cli.evaluate_command", "compare predictions with measured runs"),
    "trace": ("moreh_ap.cli.trace_command", "run a script and write a trace of some of its training steps"),
    "report": (
        "moreh_ap.cli.report_command",
        "run a script and write a report of the run, as one page",
    ),
    "launch": ("moreh_ap.cli.launch_command", "start a script on several hosts, by Slurm or Kubernetes"),
    "host": ("moreh_ap.toolkit.host_command", "let scripts on other machines use this one where ssh does not"),
    "doctor": (
        "moreh_ap.toolkit.doctor",
        "check this machine: versions, devices, limits, and whether workers reach each other",
    ),
}
"""The module of each command, which has `add_arguments` and `run`, and its line in the program's help."""

RUN_A_SCRIPT = ("verify", "plan", "trace", "report", "launch")
"""Commands that take what follows `--`; `plan` takes what follows the script's name too."""

USAGE_STATUS = 2
"""Exit status where nothing was done because of what was asked. Source: argparse, which exits with it too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status.

    Args:
        arguments: What follows the program's name; default: the process's own.
    """
    parser = argparse.ArgumentParser(prog="moreh-ap", description="Train on every device as if it were one.")
    parser.add_argument("--version", action="version", version=f"moreh-ap {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    given, script_arguments = _before_and_after_dashes(list(sys.argv[1:] if arguments is None else arguments))
    asked = next((word for word in given if word in COMMANDS), "")
    for name, (module, purpose) in COMMANDS.items():
        command = commands.add_parser(name, help=purpose)
        if name == asked:
            import_module(module).add_arguments(command)
    chosen = parser.parse_args(given)
    if chosen.command is None:
        parser.print_help(sys.stderr)
        return USAGE_STATUS
    try:
        if script_arguments and asked not in RUN_A_SCRIPT:
            raise OptionError(f"arguments after --: {' '.join(script_arguments)}", "none: no script is run")
        return int(chosen.run(chosen, script_arguments))
    except MorehError as error:
        print(error, file=sys.stderr)
        return USAGE_STATUS


def _before_and_after_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits at `--`, or for `plan` at a script's name: what follows belongs to the user's script."""
    if "--" not in arguments:
        if arguments[:1] == ["plan"]:
            end = next((place for place, word in enumerate(arguments, 1) if word.endswith(".py")), len(arguments))
            return arguments[:end], arguments[end:]
        return arguments, []
    index = arguments.index("--")
    return arguments[:index], arguments[index + 1 :]


if __name__ == "__main__":
    sys.exit(main())
