"""What a worker process finds in its environment.

Decides threads, visible devices, import path and network interfaces of each worker: on one machine they stay on its
loopback interface. Must not know the engine that starts the processes.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

from moreh_ap.errors import MeshStartError
from moreh_ap.hosts import host_files, script_files
from moreh_ap.hosts.credentials import ENGINE_VARIABLES
from moreh_ap.hosts.host_environment import passed_on
from moreh_ap.protocol.script_code.import_path import folders_of

# Set in every worker to its rank: code that runs in both kinds of process can tell them apart by it.
WORKER_VARIABLE = "MOREH_AP_WORKER"


# "1" in an agent whose workers, and itself, are not ended by SIGTERM: a job's scheduler sends it to all processes at
# once, and the script still saves what workers hold.
IGNORES_SIGTERM_VARIABLE = "MOREH_AP_IGNORES_SIGTERM"

# How many workers share a GPU: for tests of this package, which need several workers and may have one GPU.
SHARING_VARIABLE = "MOREH_AP_TEST_WORKERS_PER_GPU"


def workers_per_gpu() -> int:
    """Returns how many workers have the same GPU: one, except in tests."""
    return int(os.environ.get(SHARING_VARIABLE, "1"))


def worker_environment(
    rank: int, num_workers: int, *, device_type: str, visible_devices: str, threads_per_worker: int
) -> dict[str, str]:
    """Returns the variables to set in worker `rank`, on top of what it inherits.

    Args:
        rank: Which worker.
        num_workers: How many there are.
        device_type: "cuda" or "cpu".
        visible_devices: CUDA_VISIBLE_DEVICES as it was when the workers were asked for; empty: all.
        threads_per_worker: Threads of each worker's mathematics.

    Raises:
        MeshStartError: CUDA_VISIBLE_DEVICES names fewer devices than there are workers.
    """
    threads = str(threads_per_worker)
    variables = {
        WORKER_VARIABLE: str(rank),
        # A worker is no controller, whatever the script's own environment asks for.
        "MOREH_ENABLE_ADVANCED_PARALLELIZATION": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONPATH": import_path(),
        "PYTHONSAFEPATH": "1",  # the working directory counts only where the script's own import path has it
        "PYTHONUNBUFFERED": "",  # would write lines in pieces, between which other lines get
    }
    interface = _loopback_interface()
    if interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = interface
        variables["NCCL_SOCKET_IFNAME"] = interface
    if device_type == "cuda":
        variables["CUDA_VISIBLE_DEVICES"] = device_ids(num_workers, visible_devices)[rank]
        variables["LOCAL_RANK"] = "0"  # libraries call `set_device` with it: the worker's one device is its device 0
    return variables


def on_other_host(
    local: Mapping[str, str], rank: int, num_workers: int, files: str, interface: str
) -> dict[str, str | None]:
    """Returns the variables to set in a worker on another host; None: one that it must not have.

    Args:
        local: Those of `worker_environment`, for the workers of that host alone.
        rank: Which worker it is of all.
        num_workers: How many there are on all hosts.
        files: The folder there in which files that the host was sent lie.
        interface: The host's network interface that other hosts reach.
    """
    script = script_files.script_folder()
    sent = {host_files.FOLDER_VARIABLE: files, host_files.SCRIPT_VARIABLE: script}
    folders = [script, *local["PYTHONPATH"].split(os.pathsep)]
    return {
        **local,
        WORKER_VARIABLE: str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "PYTHONPATH": os.pathsep.join(
            dict.fromkeys(there for folder in folders for there in host_files.import_folders(folder, sent))
        ),
        **sent,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        **passed_on(os.environ),
        "TMPDIR": None,  # the agent's is for sockets, and this process's may not be there
        **dict.fromkeys(ENGINE_VARIABLES),
    }


def of_all(environments: Sequence[Mapping[str, str | None]]) -> dict[str, str]:
    """Returns the variables that are the same for all of these workers."""
    same = set.intersection(*(set(variables.items()) for variables in environments))
    return {name: value for name, value in same if value is not None}


def device_ids(num_workers: int, names: str) -> tuple[str, ...]:
    """Returns the one device that each worker sees, as its device 0.

    Args:
        num_workers: How many workers there are.
        names: CUDA_VISIBLE_DEVICES; empty: all devices.

    Raises:
        MeshStartError: `names` are fewer devices than there are workers.

    One visible device rather than `set_device(rank)` among all: "cuda" and "cuda:0" inside a model then mean in every
    worker what they mean in the script, and nothing makes a context on a neighbour's device by accident. NCCL reaches
    devices it does not see (since CUDA 10.1).
    """
    share = workers_per_gpu()
    visible = [name.strip() for name in names.split(",") if name.strip() for _ in range(share)]
    if not visible:
        return tuple(str(rank // share) for rank in range(num_workers))
    if len(visible) < num_workers:
        raise MeshStartError(
            f"{num_workers} workers need {num_workers} GPUs, but CUDA_VISIBLE_DEVICES={','.join(visible)} shows "
            f"{len(visible)}.",
            allowed=f"at most {len(visible)} devices",
            fix=f"torch.moreh.option.enable_advanced_parallelization(devices={len(visible)})",
        )
    return tuple(visible[:num_workers])


def import_path() -> str:
    """Returns this process's import path, as a variable has it."""
    return os.pathsep.join(folders_of(sys.path))


def _loopback_interface() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
