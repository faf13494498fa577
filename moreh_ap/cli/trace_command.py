"""`moreh-ap trace`: runs a script as `python` would, and has some of its training steps traced into a file.

Decides which variables the script gets and how its end becomes the exit status. Must not know how steps are traced.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from moreh_ap.cli.child_script import status_of, written_ns
from moreh_ap.errors import OptionError
from moreh_ap.settings import TRACE_STEPS_VARIABLE, TRACE_VARIABLE, TRACED_STEPS

DEFAULT_FILE = "trace.json"
_LINK = "docs/trace.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    first, last = TRACED_STEPS
    parser.description = __doc__.split("\n\n")[0]
    parser.epilog = "The exit status is the script's own, or 2 if there is no trace because the script has no one line."
    parser.add_argument("--steps", type=int, metavar="N", default=last - first + 1,
                        help=f"how many steps are traced (default {last - first + 1})")  # fmt: skip
    parser.add_argument("--first", type=int, metavar="K", default=first,
                        help=f"the first of them, counted from 1 (default {first})")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", default=Path(DEFAULT_FILE),
                        help=f"where the trace is written (default {DEFAULT_FILE})")  # fmt: skip
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a .py file with the one line")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, script_arguments: list[str]) -> int:
    """Runs the script and returns its exit status.

    Raises:
        OptionError: An argument is out of range, there is no such script, or it ended without the one line.
    """
    for name in ("steps", "first"):
        value = getattr(arguments, name)
        if value < 1:
            raise OptionError(f"--{name} {value}", "at least 1", f"moreh-ap trace --{name} 3 train.py", _LINK)
    script, file = arguments.script, arguments.output
    if not script.is_file():
        raise OptionError(f"there is no file {script}", "a script with the one line", "moreh-ap trace train.py", _LINK)
    before = written_ns(file)
    steps = f"{arguments.first}-{arguments.first + arguments.steps - 1}"
    environment = {**os.environ, TRACE_VARIABLE: str(file), TRACE_STEPS_VARIABLE: steps}
    command = [sys.executable, str(script), *arguments.arguments, *script_arguments]
    status = status_of(command, environment)
    if status == 0 and written_ns(file) == before:
        raise OptionError(
            f"{script} has ended without the one line, so there is no trace",
            "a script that calls the line, or MOREH_ENABLE_ADVANCED_PARALLELIZATION=1 in the environment",
            "torch.moreh.option.enable_advanced_parallelization()",
            _LINK,
        )
    return status
