"""`moreh-ap doctor`: whether this machine can train, line by line, with what to do where it cannot.

Decides the order of the checks and the exit status. Must not know how anything is checked.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict

from moreh_ap import accelerator_models
from moreh_ap.errors import MorehError, OptionError
from moreh_ap.hosts.host_list import parse_hosts
from moreh_ap.toolkit import findings, smi_tables
from moreh_ap.toolkit.environment_checks import check_environment
from moreh_ap.toolkit.findings import FAILED, Finding
from moreh_ap.toolkit.hosts_check import check_hosts
from moreh_ap.toolkit.machine_inventory import MachineInventory, look

DEFAULT_TIMEOUT_S = 30.0
_LEAST_TIMEOUT_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = __doc__.split("\n\n")[0]
    parser.epilog = "The exit status is 0 if nothing failed, warnings or not, else 1."
    parser.add_argument("--devices", type=int, metavar="N",
                        help="workers to start (default: as many as a process would take)")  # fmt: skip
    parser.add_argument("--hosts", metavar="A,B",
                        help="check these hosts instead, as a script that names them would")  # fmt: skip
    parser.add_argument("--timeout", type=float, metavar="S", default=DEFAULT_TIMEOUT_S,
                        help=f"seconds that each exchange may take (default {DEFAULT_TIMEOUT_S:g})")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, script_arguments: list[str]) -> int:
    """Checks, shows what was found and returns the exit status.

    Raises:
        OptionError: An argument is impossible.
    """
    if not arguments.timeout >= _LEAST_TIMEOUT_S:
        raise OptionError(
            f"--timeout {arguments.timeout:g}", f"at least {_LEAST_TIMEOUT_S:g} second", "moreh-ap doctor --timeout 30"
        )
    if arguments.hosts is not None:
        return check_hosts(parse_hosts(arguments.hosts, "--hosts"), arguments.devices, arguments.json)
    machine = look()
    most = machine.supply.num_devices if machine.gpus else None
    if arguments.devices is not None and (arguments.devices < 1 or (most and arguments.devices > most)):
        allowed = f"1 to {most}" if most else "at least 1"
        raise OptionError(f"--devices {arguments.devices}", allowed, f"moreh-ap doctor --devices {most or 2}")
    found = _checks(machine, arguments.devices, arguments.timeout)
    if arguments.json:
        everything = list(found)
        ok = not any(finding.status == FAILED for finding in everything)
        print(json.dumps({"ok": ok, "checks": [asdict(finding) for finding in everything]}, indent=1))
    else:
        shown, everything = itertools.tee(found)  # type: ignore[assignment]
        console = smi_tables.console()
        findings.show(shown, console)
        everything = list(everything)
        console.print(f"\n{findings.summary(everything)}")
    return 1 if any(finding.status == FAILED for finding in everything) else 0


def _checks(machine: MachineInventory, asked: int | None, timeout_s: float) -> Iterator[Finding]:
    supply = machine.supply
    try:
        num_devices = asked or accelerator_models.chosen_devices(supply) or supply.num_devices
    except MorehError:  # the check of the accelerator says so
        num_devices = supply.num_devices
    environment = list(check_environment(machine, num_devices))
    yield from environment
    if any(finding.status == FAILED and finding.name in ("system", "torch", "torchmonarch") for finding in environment):
        yield Finding("workers", FAILED, "not started, for want of the above")
        return
    from moreh_ap.toolkit.link_checks import check_links  # imports torch, which may be what is missing

    yield from check_links(supply.device_type, num_devices, timeout_s)
