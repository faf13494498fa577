"""`moreh-ap report`: runs a script as `python` would and writes a report of the run, or makes the page of one again.

Decides which variable the script gets. Must not know what is recorded, nor how the page looks.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from moreh_ap.cli.child_script import status_of, written_ns
from moreh_ap.errors import OptionError
from moreh_ap.local.cache_files import write_whole
from moreh_ap.reporting import page, run_record
from moreh_ap.settings import REPORT_FOLDER, REPORT_VARIABLE

_EXAMPLE = "moreh-ap report train.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = __doc__.split("\n\n")[0]
    parser.epilog = "The exit status is the script's own, or 2 if there is no report since the script has no one line."
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", default=Path(REPORT_FOLDER),
                        help=f"where the report is written (default {REPORT_FOLDER})")  # fmt: skip
    parser.add_argument("script", type=Path, metavar="SCRIPT",
                        help="a .py file with the one line, or the report.json of an earlier run")  # fmt: skip
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, script_arguments: list[str]) -> int:
    """Runs the script and returns its exit status.

    Raises:
        OptionError: There is no such script, it ended without the one line, or the file has no record of a run.
    """
    script: Path = arguments.script
    if script.suffix == ".json":
        made = script.with_name(run_record.PAGE_FILE)
        write_whole(made, page.make(run_record.read(script)))
        print(made)
        return 0
    if not script.is_file():
        raise OptionError(f"there is no file {script}", "a script with the one line", _EXAMPLE, run_record.LINK)
    record = arguments.output / run_record.RECORD_FILE
    before = written_ns(record)
    command = [sys.executable, str(script), *arguments.arguments, *script_arguments]
    status = status_of(command, {**os.environ, REPORT_VARIABLE: str(arguments.output)})
    if status == 0 and written_ns(record) == before:
        raise OptionError(
            f"{script} has ended without the one line, so there is no report",
            "a script that calls the line, or MOREH_ENABLE_ADVANCED_PARALLELIZATION=1 in the environment",
            "torch.moreh.option.enable_advanced_parallelization()",
            run_record.LINK,
        )
    return status
