"""`moreh-ap host`: lets scripts on other machines use this one, where they cannot reach it by ssh.

Decides the command's arguments and what it prints. Must not know how a script is let in.
"""

from __future__ import annotations

import argparse
import ipaddress
import signal

from moreh_ap.errors import OptionError
from moreh_ap.hosts.credentials import AgentSecret
from moreh_ap.hosts.host_list import LINK
from moreh_ap.hosts.host_report import interfaces
from moreh_ap.runtime.host.host_listener import HostListener


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = __doc__.split("\n\n")[0]
    parser.epilog = "The printed line lets its owner start programs as you: keep it as you keep a password."
    parser.add_argument("--address", metavar="IP", help="address at which the script's machine reaches this one")
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="port to listen at (default: any that is free)"
    )
    parser.add_argument(
        "--secret", metavar="FOLDER", help="certificate, key and token, as `moreh-ap launch kubernetes` makes them; "
        "then no line is printed"
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, script_arguments: list[str]) -> int:
    """Prints the line to paste, then lets scripts in until it is interrupted.

    Raises:
        OptionError: An argument is impossible.
    """
    address = arguments.address or _only_address()
    secret = None if arguments.secret is None else _secret_of(arguments.secret)
    try:
        listener = HostListener(address, arguments.port, secret)
    except (OSError, ValueError, OverflowError) as error:
        why = str(error).partition(" (while ")[0]  # `socket` repeats the address
        raise OptionError(
            f"--address {address} --port {arguments.port}: {why}",
            f"an address of this machine ({', '.join(_addresses())}) and a free port",
            f"moreh-ap host --address {next(iter(_addresses()), '127.0.0.1')}",
            f"{LINK}#by-hand",
        ) from error
    print(listener.line if secret is None else f"listening at {address}:{listener.port}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the first process of a container has no other end
    try:
        listener.serve()
    except KeyboardInterrupt:
        listener.close()
    return 0


def _secret_of(folder: str) -> AgentSecret:
    try:
        return AgentSecret.from_folder(folder)
    except OSError as error:
        names = ", ".join(AgentSecret.__match_args__)
        fix = "moreh-ap launch kubernetes --nodes 2 --image IMAGE -- python train.py  # makes such a secret"
        raise OptionError(f"--secret {folder}: {error}", f"a folder with the files {names}", fix) from error


def _addresses() -> list[str]:
    """Returns the addresses of this machine that others may reach."""
    found = [ipaddress.ip_address(address) for address in interfaces()]
    return [str(address) for address in found if not address.is_loopback and not address.is_link_local]


def _only_address() -> str:
    addresses = _addresses()
    if len(addresses) != 1:
        raise OptionError(
            f"This machine has {len(addresses)} addresses: {', '.join(addresses) or 'none'}",
            "the address at which the script's machine and the other hosts reach it",
            f"moreh-ap host --address {addresses[0] if addresses else '127.0.0.1'}",
            f"{LINK}#by-hand",
        )
    return addresses[0]
