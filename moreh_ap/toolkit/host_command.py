"""`moreh-ap host`: lets scripts on other machines use this one, where they cannot reach it by ssh.

Decides the command's arguments and what it prints. Must not know how a script is let in.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal

from moreh_ap.errors import OptionError
from moreh_ap.hosts.certificates import make_agent_secret
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
        "--secret", metavar="FOLDER", help="keeps certificate, key and token: made, and the line printed, the first "
        "time; with the same port the line is the same from then on, and is not printed again"
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, script_arguments: list[str]) -> int:
    """Prints the line to paste, then lets scripts in until it is interrupted.

    Raises:
        OptionError: An argument is impossible.
    """
    address = arguments.address or _only_address()
    folder = arguments.secret
    is_new = folder is None or not os.path.lexists(folder)
    secret = make_agent_secret() if is_new else _secret_of(folder)
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
    if is_new and folder is not None:  # who could not listen has not seen its line
        try:
            secret.to_folder(folder)
        except OSError as error:
            listener.close()
            raise _not_kept(folder, error) from error
    print(listener.line if is_new else f"listening at {address}:{listener.port}", flush=True)
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
        raise _not_kept(folder, error) from error


def _not_kept(folder: str, error: OSError) -> OptionError:
    names = ", ".join(AgentSecret.__match_args__)
    return OptionError(
        f"--secret {folder}: {error}",
        f"a folder with the files {names}, or one that is not there yet: it is made",
        "moreh-ap host --port 40123 --secret agent-secret",
        f"{LINK}#added",
    )


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
