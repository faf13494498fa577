"""Whether this machine and this installation have what a run needs, without starting a worker.

Decides what is checked and which values are good enough. Must not know how findings are shown. Nothing is changed: a
check removes the files that it writes.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from moreh_ap import accelerator_models, checked_versions
from moreh_ap.errors import MorehError
from moreh_ap.local.cache_files import cache_folder
from moreh_ap.local.jobs import running_jobs
from moreh_ap.toolkit.findings import FAILED, OK, WARNING, Finding
from moreh_ap.toolkit.machine_inventory import MachineInventory

DISTRIBUTION = "moreh-ap"

WORKER_FILES, CONTROLLER_FILES = 11, 512
"""File descriptors that the script's process holds for each worker, and for everything else. Measured with torch 2.13
and 1 and 3 CPU workers: 11 for each and 33; the rest is left for the script's data and its loaders."""

WORKER_BYTES = 330 * 2**20
"""Memory of a worker before it holds a model: resident, measured with torch 2.13, CPU."""

_GIB = 2**30
_SCRATCH_BYTES = _GIB
_SHARED_BYTES = 64 * 2**20
_CONNECT_S = 5.0


def check_environment(machine: MachineInventory, num_devices: int) -> Iterator[Finding]:
    """Yields what is found, in an order in which causes come before effects.

    Args:
        machine: What there is.
        num_devices: Workers that will be started.
    """
    yield _system()
    yield from _packages()
    yield _versions()
    yield _devices(machine)
    yield _accelerator(machine)
    yield _memory(machine, num_devices)
    yield _open_files(num_devices)
    yield _shared_memory()
    yield _folder("cache folder", cache_folder(), "export MOREH_AP_CACHE=FOLDER")
    yield _folder("scratch folder", Path(tempfile.gettempdir()), "export TMPDIR=FOLDER")
    yield _loopback()
    yield _host_name()
    yield _other_jobs()


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("system", FAILED, found, "workers need Linux: a container or WSL 2")
    return Finding("system", OK, found)


def _packages() -> Iterator[Finding]:
    """Compares what is installed with what this package's own metadata asks for."""
    try:
        about = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield Finding("packages", FAILED, f"{DISTRIBUTION} is not installed", "pip install .")
        return
    wanted = about["Requires-Python"] or ""
    version = platform.python_version()
    fits = SpecifierSet(wanted).contains(version, prereleases=True)
    yield Finding("Python", OK if fits else FAILED, f"{version} ({wanted})", "" if fits else f"Python {wanted}")
    for text in about.get_all("Requires-Dist") or []:
        yield from _package(text)


def _package(text: str) -> Iterator[Finding]:
    try:
        wanted = Requirement(text)
    except InvalidRequirement as error:
        yield Finding("packages", FAILED, f"the metadata of {DISTRIBUTION} is broken: {error}", "install it again")
        return
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return
    install = f'pip install "{wanted.name}{wanted.specifier}"'
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        yield Finding(wanted.name, FAILED, f"is not installed ({wanted.specifier or 'any version'})", install)
        return
    fits = wanted.specifier.contains(version, prereleases=True)
    found = f"{version} ({wanted.specifier or 'any version'})"
    yield Finding(wanted.name, OK if fits else FAILED, found, "" if fits else install)


def _versions() -> Finding:
    """Whether what is in range was also checked together."""
    found = checked_versions.installed()
    check = checked_versions.find_check(found)
    if check is None:
        return Finding("versions", WARNING, "were not checked together", checked_versions.fix_of(found))
    return Finding("versions", OK if check.was_run else WARNING, f"checked with {check.versions}: {check.how}",
                   "" if check.was_run else checked_versions.fix_of(found))  # fmt: skip


def _devices(machine: MachineInventory) -> Finding:
    found = f"{machine.supply}; {machine.processor}"
    if machine.gpus:
        return Finding("devices", OK, f"{len(machine.gpus)} x {machine.gpus[0].name}")
    if os.path.exists("/dev/nvidiactl") and os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() not in ("", "-1"):
        return Finding("devices", WARNING, f"{found}; the driver of a GPU is here, but PyTorch sees none",
                       "a PyTorch built for CUDA: https://pytorch.org/get-started/locally")  # fmt: skip
    return Finding("devices", OK, found)


def _accelerator(machine: MachineInventory) -> Finding:
    accelerators = accelerator_models.load(machine.supply.device_type)
    name = accelerators.model or accelerator_models.model_of_all(machine.supply)
    try:
        chosen = accelerator_models.chosen_devices(machine.supply)
    except MorehError as error:
        return Finding("accelerator", FAILED, error.fact, error.fix)
    count = chosen or machine.supply.num_devices
    found = f"{accelerators.current}, model {name}: {count} device{'s' if count > 1 else ''}"
    return Finding("accelerator", OK, found)


def _memory(machine: MachineInventory, num_devices: int) -> Finding:
    available = min(int(psutil.virtual_memory().available), machine.supply.memory_bytes)
    found = f"{available / _GIB:.1f} GiB of {machine.supply.memory_bytes / _GIB:.1f} GiB are free"
    needed = num_devices * WORKER_BYTES
    if available < needed:
        found += f"; {num_devices} workers without a model need {needed / _GIB:.1f} GiB"
        return Finding("memory", WARNING, found, "end other programs, or fewer devices: moreh-switch-model")
    return Finding("memory", OK, found)


def _open_files(num_devices: int) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = CONTROLLER_FILES + num_devices * WORKER_FILES
    found = "no limit" if limit == resource.RLIM_INFINITY else f"{limit} a process"
    if limit != resource.RLIM_INFINITY and limit < needed:
        return Finding("open files", WARNING, f"{found}; {num_devices} workers may need {needed}", "ulimit -n 65536")
    return Finding("open files", OK, found)


def _shared_memory() -> Finding:
    """The workers of data loaders pass batches through it."""
    path = Path("/dev/shm")
    if not os.access(path, os.W_OK):
        return Finding("/dev/shm", FAILED, "is not there or cannot be written", "mount -t tmpfs tmpfs /dev/shm")
    free = shutil.disk_usage(path).free
    found = f"{free / 2**20:.0f} MiB are free"
    if free <= _SHARED_BYTES:  # what Docker gives by default
        return Finding("/dev/shm", WARNING, f"{found}, little for data loaders", "docker run --shm-size=8g ...")
    return Finding("/dev/shm", OK, found)


def _folder(name: str, path: Path, fix: str) -> Finding:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"moreh-ap doctor")
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding(name, FAILED, f"{path} cannot be written: {error.strerror or error}", fix)
    found = f"{path}, {free / _GIB:.1f} GiB are free"
    return Finding(name, OK, found) if free >= _SCRATCH_BYTES else Finding(name, WARNING, found, fix)


def _loopback() -> Finding:
    """Opens a port on the loopback interface, as the workers' meeting place is, and sends a few bytes through it."""
    sent = os.urandom(16)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_CONNECT_S)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), _CONNECT_S) as client:
                accepted = server.accept()[0]
                with accepted:
                    accepted.settimeout(_CONNECT_S)
                    client.sendall(sent)
                    arrived = accepted.recv(len(sent))
    except OSError as error:
        return Finding("loopback", FAILED, f"127.0.0.1 does not answer: {error}",
                       "ip link set lo up; no firewall rule on the interface lo")  # fmt: skip
    if arrived != sent:
        return Finding("loopback", FAILED, "127.0.0.1 returned other bytes than were sent", "look for a proxy on it")
    return Finding("loopback", OK, f"127.0.0.1, port {port} opened and reached")


def _host_name() -> Finding:
    """Libraries in scripts look their own host up; workers do not."""
    name = socket.gethostname()
    try:
        return Finding("host name", OK, f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        return Finding("host name", WARNING, f"{name} cannot be resolved: {error}",
                       f'echo "127.0.1.1 {name}" | sudo tee -a /etc/hosts')  # fmt: skip


def _other_jobs() -> Finding:
    jobs = running_jobs()
    if jobs:
        names = ", ".join(job.job_id for job in jobs)
        return Finding("other jobs", WARNING, f"{names} run on the same devices", "moreh-smi shows them")
    return Finding("other jobs", OK, "none")
