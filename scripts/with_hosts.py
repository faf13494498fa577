"""Runs a script on several "hosts" that are all this machine: agents that listen on loopback.

    python scripts/with_hosts.py 2 -- python tutorials/train_llama3_70b.py --embedded

That shows what several machines do, without their speed: each agent joins as a host, over TLS, with workers of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

AGENT = (sys.executable, "-m", "moreh_ap.cli.main", "host", "--address", "127.0.0.1")


@contextlib.contextmanager
def agents(num_hosts: int) -> Iterator[str]:
    """Has agents listen; gives the path of a file with the line of each, which is a secret."""
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    started = []
    try:
        for _ in range(num_hosts):
            # Ctrl-C is for the script, whose end ends what runs on the hosts.
            started.append(
                subprocess.Popen(AGENT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
            )
        lines = [agent.stdout.readline() for agent in started if agent.stdout]
        if not all(lines):
            raise SystemExit("with_hosts.py: an agent has ended")
        with tempfile.NamedTemporaryFile("w", prefix="moreh-hosts-") as file:  # readable for this user alone
            file.writelines(lines)
            file.flush()
            yield file.name
    finally:
        for agent in started:
            agent.terminate()
        for agent in started:
            agent.wait()


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", type=int, help="how many")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the script's command line")
    given = parser.parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if given.hosts < 1 or not command:
        parser.error("a number of hosts, at least 1, then -- and a command")
    with agents(given.hosts) as hosts:
        return subprocess.run(command, env={**os.environ, "MOREH_HOSTS": hosts}).returncode


if __name__ == "__main__":
    sys.exit(main())
