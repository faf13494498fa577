"""Fewer devices than there are, where they are faster: chosen, remembered, given up; a number that is given is kept."""

import json
import os
import re
from functools import cache

import pytest
from user_script import UserScript

from moreh_ap import accelerator_models
from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.protocol.messages.devices import DeviceInfo
from moreh_ap.session.planning import device_count_records, machine_profile
from moreh_ap.session.planning.device_rates import as_entry
from unit.session.planning.samples import rates

ALL, FEW = 3, 2  # two rows: a device each
TIMEOUT_S = 280.0  # workers start up to three times
CHOSEN = re.compile(
    rf"{FEW} of {ALL} devices are used: a step is predicted to take \S+ s on {FEW}, and \S+ s on {ALL} "
)
REMEMBERED = f"{FEW} of {ALL} devices are used, as in an earlier run of this script"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An accelerator of three CPU workers, on which no step is measured to be as slow as it is predicted."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    accelerator_models.save("cpu", accelerator_models.Accelerators(0, {0: f"CPU.{ALL}"}))
    set_machine(30_000.0)
    return tmp_path


def set_machine(slower_exchanges):
    """Has exchanges between all devices be slow, and fewer devices compute slowly."""
    cores = len(os.sched_getaffinity(0))
    for count, computing, talking in ((ALL, 0.2, slower_exchanges), (FEW, 20.0, 1.0)):
        threads = max(1, cores // count)
        info = DeviceInfo("CPU", 2**33, native_bf16=False, num_threads=threads, num_cores=cores)
        slow = as_entry(rates(computing, (count,)))
        slow["exchanges"] = [(*row[:3], row[3] * talking, row[4] * talking) for row in slow["exchanges"]]
        machine_profile.FILE.keep(machine_profile.machine_key(info, count), slow)


def run(folder, *arguments, **variables):
    """Returns what the script printed, and its losses."""
    with UserScript("fewer_devices.py", *arguments, cwd=folder, ALL_DEVICES=str(ALL), **variables) as script:
        out = script.succeed(TIMEOUT_S)
    return out, json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """``one_process(*arguments)``: the losses of one process, of a second model too if "larger" is asked for."""
    return cache(lambda *arguments: run(tmp_path_factory.mktemp("one"), "one", *arguments)[1])


def starts(out):
    """Returns how many workers were started, each time; a start that took too long and was repeated counts once."""
    requests = out.split("Requesting resources")[1:]
    return [int(found[1]) for found in (re.search(r"\[\d+/(\d+)\] Connecting", part) for part in requests) if found]


def record(folder):
    (entry,) = json.loads(device_count_records.FILE.path.read_text()).values()
    return entry


@pytest.mark.rotating
def test_fewer_devices_are_chosen_shown_and_remembered(folder, one_process):
    with UserScript("fewer_devices.py", "plain", cwd=folder, ALL_DEVICES=str(ALL)) as script:
        script.wait_for_output('plan="', TIMEOUT_S)
        (path,) = (folder / "jobs").iterdir()
        job = json.loads(path.read_text())
        assert (job["devices"], len(job["workers"])) == (FEW, FEW), "as `moreh-smi` shows it"
        out = script.succeed(TIMEOUT_S)
    assert CHOSEN.search(out) and starts(out) == [ALL, FEW]
    assert "devices: 1\n" in out and f'plan="replicate={FEW}"' in out
    assert json.loads(out.splitlines()[-1]) == pytest.approx(one_process(), rel=1e-5)
    out, losses = run(folder, "plain")
    assert REMEMBERED in out and starts(out) == [FEW], "nothing restarts"
    assert losses == pytest.approx(one_process(), rel=1e-5)
    assert record(folder)["devices"] == FEW


@pytest.mark.rotating
def test_a_number_that_is_asked_for_is_kept(folder):
    assert starts(run(folder, "given")[0]) == [ALL]
    assert starts(run(folder, "plain", MOREH_NUM_DEVICES=str(ALL))[0]) == [ALL]
    assert not device_count_records.FILE.path.exists()


@pytest.mark.rotating
def test_a_second_model_that_is_faster_on_all_devices_gets_them_and_the_next_run_starts_with_all(folder, one_process):
    set_machine(1000.0)
    out, losses = run(folder, "plain", "larger")
    assert starts(out) == [ALL, FEW, ALL]
    assert f"all {ALL} devices are used from now on: Model is predicted to take" in out
    assert losses == pytest.approx(one_process("larger"), rel=1e-5)
    out, losses = run(folder, "plain", "larger")
    assert starts(out) == [ALL]
    assert losses == pytest.approx(one_process("larger"), rel=1e-5)


@pytest.mark.rotating
def test_where_fewer_devices_run_out_of_memory_all_are_used(folder, one_process):
    out, losses = run(folder, "memory")
    assert CHOSEN.search(out) and starts(out)[:2] == [ALL, FEW] and starts(out)[-1] == ALL
    assert f"all {ALL} devices are used from now on: " in out
    assert losses == pytest.approx(one_process(), rel=1e-5)
    assert starts(run(folder, "memory")[0]) == [ALL]
