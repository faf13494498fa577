"""The hosts of a Kubernetes job that `moreh-ap launch kubernetes` has described, as its script sees them.

Decides which pods there are, how each is named and recognised, and when all have started. Must not know how the job is
described: that is `kubernetes_manifests.py`.

The job is an Indexed Job. Its first pod runs the script; the others run `moreh-ap host`, with a secret that all pods of
the job have mounted. A headless service of the job's name gives each pod a name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from moreh_ap.errors import MeshStartError, OptionError
from moreh_ap.hosts import reachability
from moreh_ap.hosts.credentials import AgentSecret

JOB_VARIABLE = "MOREH_KUBERNETES_JOB"
NODES_VARIABLE = "MOREH_KUBERNETES_NODES"
START_VARIABLE = "MOREH_KUBERNETES_START_S"
ADDRESS_VARIABLE = "POD_IP"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"  # set by Kubernetes
SECRET_FOLDER = "/run/secrets/moreh-ap"
PORT = 26600
START_S = 900.0
"""How long the other pods may take from here to start: for a node to be free, and its image to arrive."""

_AGAIN_S = 1.0
_LINK = "docs/several-machines.md#kubernetes"


def pods(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the job's pods.

    Raises:
        OptionError: This process does not run in the first pod of such a job.
    """
    job, nodes = environment.get(JOB_VARIABLE, ""), environment.get(NODES_VARIABLE, "")
    missing = [
        name
        for name in (JOB_VARIABLE, NODES_VARIABLE, ADDRESS_VARIABLE, INDEX_VARIABLE)
        if not environment.get(name, "")
    ]
    if missing or not nodes.isdecimal() or environment[INDEX_VARIABLE] != "0":
        seen = f"{missing[0]} is not set" if missing else f"pod {environment[INDEX_VARIABLE]} of {nodes}"
        raise OptionError(
            f"hosts='kubernetes', but {seen}: this process is not the script of a job for several hosts",
            "the first pod of a job that `moreh-ap launch kubernetes` has described",
            "moreh-ap launch kubernetes --nodes 2 --image IMAGE -- python train.py",
            _LINK,
        )
    return [f"{job}-{index}" for index in range(int(nodes))]


def own_pod(environment: Mapping[str, str]) -> str:
    """Returns the name of the pod in which this process runs."""
    return f"{environment.get(JOB_VARIABLE, '')}-{environment.get(INDEX_VARIABLE, '')}"


def line_of(pod: str, environment: Mapping[str, str]) -> str:
    """Returns the line by which the agent of another pod is reached; it has secrets.

    Raises:
        OSError: The secret is not mounted.
    """
    return AgentSecret.from_folder(SECRET_FOLDER).line(_name(pod, environment), PORT)


def await_agents(pods_wanted: list[str], environment: Mapping[str, str]) -> None:
    """Waits until the agents of all other pods listen.

    Raises:
        MeshStartError: One does not in time.
    """
    others = [pod for pod in pods_wanted if pod != own_pod(environment)]
    if not others:
        return
    limit_s = float(environment.get(START_VARIABLE) or START_S)
    deadline_s = time.monotonic() + limit_s
    said = False
    with ThreadPoolExecutor(min(len(others), 64), thread_name_prefix="moreh-await") as threads:
        while True:
            reasons = list(threads.map(lambda pod: reachability.reaches(_name(pod, environment), PORT), others))
            waiting = {pod: reason for pod, reason in zip(others, reasons) if reason}
            if not waiting:
                return
            names = ", ".join(waiting)
            if time.monotonic() > deadline_s:
                raise MeshStartError(
                    f"The agents of {names} do not listen after {limit_s:g} s: {next(iter(waiting.values()))}",
                    fix=f"kubectl describe pods --selector job-name={environment[JOB_VARIABLE]}",
                )
            if not said:
                print(f"[info] waiting until these pods have started: {names}", file=sys.stderr, flush=True)
                said = True
            time.sleep(_AGAIN_S)


def _name(pod: str, environment: Mapping[str, str]) -> str:
    """Returns what the name service of the cluster calls a pod, seen from its namespace."""
    return f"{pod}.{environment[JOB_VARIABLE]}"
