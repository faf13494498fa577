"""The hosts of a Slurm job, as a process inside of it sees them.

Decides how they are found out, how a program is started on one, and what a job is asked for. Must not know which
program.
"""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence

from moreh_ap.errors import OptionError

_NODES_VARIABLE = "SLURM_JOB_NODELIST"
_ASK_S = 10.0
_NODE_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")

_STEP = (
    "srun",
    "--nodes=1",
    "--ntasks=1",
    "--overlap",  # beside the step in which the script runs
    "--mem=0",  # all that the job has there
    "--cpu-bind=none",
    "--quiet",
)
"""One step a host: a host that is lost ends its own step only. Source: srun(1)."""


def nodes(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the job's hosts.

    Raises:
        OptionError: This process runs in no job, or Slurm does not answer.
    """
    listed = environment.get(_NODES_VARIABLE, "")
    if not listed:
        raise OptionError(
            f"hosts='slurm', but {_NODES_VARIABLE} is not set: this process runs in no Slurm job",
            "sbatch, or salloc",
            "salloc --nodes 2 --exclusive python train.py",
            "docs/several-machines.md#slurm",
        )
    return _ask("show", "hostnames", listed).split()


def address_of(node: str) -> str:
    """Returns the numeric address under which Slurm reaches a host.

    Raises:
        OSError: It has none that can be looked up.
    """
    found = _NODE_ADDRESS.search(_ask("show", "node", node))
    return str(socket.getaddrinfo(found[1] if found else node, None, type=socket.SOCK_STREAM)[0][4][0])


def command(node: str, program: Sequence[str]) -> list[str]:
    """Returns the command line that runs a program on a host of the job."""
    return [*_STEP, f"--nodelist={node}", *program]


def batch_script(name: str, num_nodes: int, program: Sequence[str], options: Sequence[str] = ()) -> str:
    """Returns what sbatch is given so that a script runs on the hosts of a job of its own.

    Args:
        name: The job's name; what it prints is in NAME-JOB.log.
        num_nodes: Hosts.
        program: The script's command line. It runs on the first host.
        options: Further options of sbatch, such as "--partition=gpu"; they outrank those that are written here.
    """
    own = ("--exclusive", "--mem=0", f"--output={name}-%j.log")  # all devices, cores and memory of each host
    wanted = (f"--job-name={name}", f"--nodes={num_nodes}", "--ntasks-per-node=1", *own, *options)
    lines = "".join(f"#SBATCH {option}\n" for option in wanted)
    return f"#!/bin/sh\n{lines}export MOREH_HOSTS=slurm\nexec {shlex.join(program)}\n"


def _ask(*words: str) -> str:
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    else:
        if done.returncode == 0:
            return done.stdout
        said = done.stderr.strip()
    raise OptionError(f"scontrol {' '.join(words)}: {said}", "a Slurm that answers", f"scontrol {' '.join(words)}")
