"""The checks of `moreh-ap doctor` that start no worker."""

from __future__ import annotations

import resource
import shutil
import socket
from collections import namedtuple
from importlib import metadata

from moreh_ap import accelerator_models
from moreh_ap.accelerator_models import Accelerators, Supply
from moreh_ap.local import jobs
from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.toolkit import environment_checks
from moreh_ap.toolkit.findings import FAILED, OK, WARNING, Finding
from moreh_ap.toolkit.machine_inventory import Gpu, MachineInventory

TWO_CORES = MachineInventory(Supply("cpu", 2, 24 * 2**30), "A CPU")


def checked(machine=TWO_CORES, num_devices=2) -> dict[str, Finding]:
    return {found.name: found for found in environment_checks.check_environment(machine, num_devices)}


def test_what_this_machine_has_is_enough_for_the_tests(monkeypatch):
    found = checked()
    assert {"Python", "torch", "torchmonarch", "transformers", "psutil", "loopback", "/dev/shm"} <= set(found)
    assert not [one for one in found.values() if one.status == FAILED]
    assert found["torch"].found.startswith(metadata.version("torch"))


def test_packages_out_of_range_or_missing_fail_with_the_line_to_paste(monkeypatch):
    versions = {"torch": "2.3.0", "torchmonarch": "0.6.1"}
    real = metadata.version

    def version(name):
        if name == "transformers":
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = checked()
    assert found["torch"] == Finding("torch", FAILED, "2.3.0 (>=2.11)", 'pip install "torch>=2.11"')
    assert found["torchmonarch"].fix == 'pip install "torchmonarch==0.7.0"'
    assert found["transformers"].status == FAILED and "is not installed" in found["transformers"].found
    assert "pytest" not in found, "what only developers need is nobody's failure"


def test_limits_that_are_too_low(monkeypatch, cache):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 * 2**20, 0, 64 * 2**20))
    (cache / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(cache / "file"))

    def unknown(name):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    little = MachineInventory(Supply("cpu", 2, 2**28), "A CPU")
    found = checked(little)
    assert (found["open files"].status, found["open files"].fix) == (WARNING, "ulimit -n 65536")
    assert (found["/dev/shm"].status, found["scratch folder"].status) == (WARNING, WARNING)
    assert found["cache folder"].status == FAILED and "cannot be written" in found["cache folder"].found
    assert found["host name"].status == WARNING and "/etc/hosts" in found["host name"].fix
    assert found["memory"].status == WARNING
    assert all(one.fix for one in found.values() if one.status != OK)


def test_a_loopback_that_does_not_answer(monkeypatch):
    def refused(address, timeout):
        raise ConnectionRefusedError("Connection refused")

    monkeypatch.setattr(socket, "create_connection", refused)
    found = checked()["loopback"]
    assert found.status == FAILED and "Connection refused" in found.found


def test_a_model_with_more_devices_than_there_are(monkeypatch):
    gpus = tuple(Gpu(index, "H100", 2**36) for index in range(2))
    accelerator_models.save("cuda", Accelerators(0, {0: "Large.256GB"}))
    found = checked(MachineInventory(Supply("cuda", 2), "A CPU", gpus))
    assert found["accelerator"].status == FAILED
    assert found["devices"].found == "2 x H100"


def test_other_jobs_are_a_warning(monkeypatch):
    job = jobs.Job(0, "", "cpu", 1, 1)
    assert checked()["other jobs"].status == WARNING
    job.close()
    assert checked()["other jobs"].status == OK
