"""`moreh-ap`: the program that `pip install` puts on the path.

Decides which commands there are and how a failure ends the program. Imports nothing heavy before a command is known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moreh_ap.cli import evaluate, plan, predict, verify
from moreh_ap.errors import MorehError
from moreh_ap.toolkit import doctor
from moreh_ap.version import __version__

USAGE_STATUS = 2
"""Exit status where nothing was done because of what was asked. Source: argparse, which exits with it too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status.

    Args:
        arguments: What follows the program's name; default: the process's own.
    """
    parser = argparse.ArgumentParser(prog="moreh-ap", description="Train on every device as if it were one.")
    parser.add_argument("--version", action="version", version=f"moreh-ap {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (verify, plan, predict, evaluate, doctor):
        command.add_arguments(commands)
    given, script_arguments = _before_and_after_dashes(list(sys.argv[1:] if arguments is None else arguments))
    chosen = parser.parse_args(given)
    try:
        return int(chosen.run(chosen, script_arguments))
    except MorehError as error:
        print(error, file=sys.stderr)
        return USAGE_STATUS


def _before_and_after_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits at `--`: what follows belongs to the user's script."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


if __name__ == "__main__":
    sys.exit(main())
