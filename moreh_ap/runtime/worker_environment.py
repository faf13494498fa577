"""What a worker process finds in its environment, and where the workers of one group meet.

Decides threads, visible devices, import path and network interfaces of each worker. Everything here belongs to one
machine and stays on its loopback interface. Must not know the engine that starts the processes.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

from moreh_ap.errors import MeshStartError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_LOOPBACK = "127.0.0.1"

# Set in every worker to its rank: code that runs in both kinds of process can tell them apart by it.
WORKER_VARIABLE = "MOREH_AP_WORKER"


def open_store(num_workers: int) -> TCPStore:
    """Returns the key-value store at which the workers' process group meets, hosted by this process.

    The system picks the port, so two jobs on one machine do not meet. PyTorch's own listener would answer on every
    interface; a socket bound here keeps it on the loopback one.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(_LOOPBACK, port, num_workers + 1, True, wait_for_workers=False, master_listen_fd=listener.detach())


def worker_environment(
    rank: int, num_workers: int, *, device_type: str, visible_devices: str, threads_per_worker: int, store_port: int
) -> dict[str, str]:
    """Returns the variables to set in worker `rank`, on top of what it inherits.

    Args:
        rank: Which worker.
        num_workers: How many there are.
        device_type: "cuda" or "cpu".
        visible_devices: CUDA_VISIBLE_DEVICES as it was when the workers were asked for; empty: all.
        threads_per_worker: Threads of each worker's mathematics.
        store_port: Where `open_store` listens.

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
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(store_port),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONPATH": _import_path(),
        "PYTHONSAFEPATH": "1",  # the working directory counts only where the script's own import path has it
        "PYTHONUNBUFFERED": "",  # would write lines in pieces, between which other lines get
    }
    interface = _loopback_interface()
    if interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = interface
        variables["NCCL_SOCKET_IFNAME"] = interface
    if device_type == "cuda":
        variables["CUDA_VISIBLE_DEVICES"] = _visible_device(rank, num_workers, visible_devices)
    return variables


def _visible_device(rank: int, num_workers: int, names: str) -> str:
    """Returns the one device that worker `rank` sees, as its device 0.

    One visible device rather than `set_device(rank)` among all: "cuda" and "cuda:0" inside a model then mean in every
    worker what they mean in the script, and nothing makes a context on a neighbour's device by accident. NCCL reaches
    devices it does not see (since CUDA 10.1).
    """
    visible = [name for name in names.split(",") if name.strip()]
    if not visible:
        return str(rank)
    if len(visible) < num_workers:
        raise MeshStartError(
            f"{num_workers} workers need {num_workers} GPUs, but CUDA_VISIBLE_DEVICES={','.join(visible)} shows "
            f"{len(visible)}.",
            allowed=f"at most {len(visible)} devices",
            fix=f"torch.moreh.option.enable_advanced_parallelization(devices={len(visible)})",
        )
    return visible[rank].strip()


def _import_path() -> str:
    """Returns this process's import path; an empty entry means the working directory."""
    return os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path if isinstance(entry, str)))


def _loopback_interface() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
