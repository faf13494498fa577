"""`moreh-smi`: the accelerators of this machine, the jobs that run on them, and ending those that are stuck.

Decides which arguments there are and what each leads to. Must not know how a state is read or a table made.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata

from rich.console import Console, RenderableType
from rich.live import Live

from moreh_ap import accelerator_models
from moreh_ap.errors import OptionError
from moreh_ap.toolkit import device_command, job_usage, prompts, reset, smi_tables
from moreh_ap.toolkit.machine_inventory import look
from moreh_ap.version import __version__

_LEAST_PERIOD_S = 0.5
_LINK = "docs/toolkit.md#moreh-smi"
_COMPONENTS = ("torch", "torchmonarch", "transformers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status.

    Args:
        arguments: What follows the program's name; default: the process's own.
    """
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    if chosen.yes and not chosen.reset:
        parser.error("--yes belongs to --reset")
    if chosen.loop is not None and (chosen.json or chosen.reset or chosen.command):
        parser.error("--loop goes with tables only")
    return prompts.run_tool(lambda: _run(chosen))


def make_parser() -> argparse.ArgumentParser:
    """Returns what reads the arguments."""
    parser = argparse.ArgumentParser(
        prog="moreh-smi", description="Show the accelerators of this machine and the jobs that run on them."
    )
    parser.add_argument("-v", "--version", action="version", version=f"moreh-smi {__version__}")
    parser.add_argument("-s", "--server-version", action="store_true",
                        help="versions of what carries out jobs on this machine")  # fmt: skip
    parser.add_argument("-p", "--physical", action="store_true",
                        help="each physical device, and each job's model and plan")  # fmt: skip
    parser.add_argument("-i", "--idx", type=int, metavar="N", help="accelerator N only")
    parser.add_argument("-l", "--loop", type=float, nargs="?", const=1.0, metavar="SECONDS",
                        help="again every so many seconds (default 1) until Ctrl-C")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    parser.add_argument("-r", "--reset", action="store_true", help="end jobs that are stuck, after asking")
    parser.add_argument("--yes", action="store_true", help="with --reset: do not ask")
    device_command.add_arguments(parser.add_subparsers(dest="command", metavar="device"))
    return parser


def _run(chosen: argparse.Namespace) -> int:
    if chosen.command == "device":
        return device_command.run(chosen)
    if chosen.server_version:
        print("\n".join(_versions()))
        return 0
    if chosen.idx is not None:
        device_command.find_accelerator(str(chosen.idx), accelerator_models.load(look().supply.device_type))
    if chosen.reset:
        return reset.run(chosen.idx, chosen.yes)
    if chosen.json:
        print(json.dumps(smi_tables.plain(job_usage.snapshot(), chosen.idx), indent=1, ensure_ascii=False))
        return 0
    make = smi_tables.physical if chosen.physical else smi_tables.overview
    if chosen.loop is None:
        smi_tables.console().print(make(job_usage.snapshot(), chosen.idx))
        return 0
    return _show_again(lambda sample_s: make(job_usage.snapshot(sample_s), chosen.idx), chosen.loop)


def _show_again(make: Callable[[float], RenderableType], period_s: float) -> int:
    """Shows a table until Ctrl-C: in place on a terminal, one below the other elsewhere.

    Raises:
        OptionError: The period is too short.
    """
    if not period_s >= _LEAST_PERIOD_S:
        raise OptionError(f"-l {period_s:g}", f"at least {_LEAST_PERIOD_S:g} seconds", "moreh-smi -l 1", _LINK)
    console = smi_tables.console()
    try:
        if not console.is_terminal:
            _print_again(console, make, period_s)
        with Live(make(job_usage.SAMPLE_S), console=console, auto_refresh=False) as shown:
            while True:
                started_s = time.monotonic()
                shown.update(make(job_usage.SAMPLE_S), refresh=True)
                time.sleep(max(0.0, period_s - (time.monotonic() - started_s)))
    except KeyboardInterrupt:
        return 0


def _print_again(console: Console, make: Callable[[float], RenderableType], period_s: float) -> None:
    while True:
        started_s = time.monotonic()
        console.print(time.strftime("%Y-%m-%d %H:%M:%S"))
        console.print(make(job_usage.SAMPLE_S))
        time.sleep(max(0.0, period_s - (time.monotonic() - started_s)))


def _versions() -> list[str]:
    """Returns a line with the version of each component that executes jobs."""
    found = [f"moreh_ap {__version__}", f"Python {platform.python_version()}"]
    for name in _COMPONENTS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} is not installed")
    return [*found, f"{platform.system()} {platform.release()}, {look().supply}"]


if __name__ == "__main__":
    sys.exit(main())
