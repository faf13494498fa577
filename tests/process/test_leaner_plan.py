"""Workers that run out of memory after the first step: others go on under the next plan from what recovery has kept.

`scripts/out_of_memory_later.py` trains with one device and then with workers that run out once; losses, norms, weights,
an average of them and outputs are compared.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest
from user_script import UserScript

from moreh_ap.session.planning.machine_profile import FILE

TOOK_OVER = re.compile(
    r'\[info\] plan="([^"]+)" ran out of memory: CUDA out of memory\. Tried to allocate 2\.00 GiB\. '
    r'Others took over with plan="([^"]+)": (\d+) steps? (?:was|were) computed again, \d+\.\d s'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of what is remembered: the machine's rates, if they are known, and no plan that ran out."""
    if FILE.path.exists():
        shutil.copy(FILE.path, tmp_path)
    return tmp_path


def run_out(folder: Path, *faults: str, num_starts: int = 1, **variables: str) -> list[tuple[str, str, int]]:
    """Runs the script and compares; returns the plan before and after each fault, and the steps computed again."""
    with tempfile.TemporaryDirectory(prefix="fatal-") as fatal:
        known = {"MOREH_AP_CACHE": str(folder), "FATAL_FOLDER": fatal, "MOREH_RECOVERY": "memory"}
        with UserScript("out_of_memory_later.py", *faults, cwd=folder, **{**known, **variables}) as script:
            out = script.succeed(timeout_s=280)
            script.leaves_nothing()
    for fault in faults:
        found = re.search(rf"^{fault}: (\d+) values, largest difference (\S+)\nleft over: \[\]$", out, re.MULTILINE)
        assert found, f"{fault}\n{out}"
        assert int(found[1]) > 20 and float(found[2]) < 1e-5, found[0]
    taken_over = TOOK_OVER.findall(out)
    assert len(taken_over) == len(faults), out
    assert out.count("MoAI Accelerator is ready") == num_starts, "one line is all that the script sees of it"
    return [(before, after, int(steps)) for before, after, steps in taken_over]


@pytest.mark.rotating
def test_the_next_plan_takes_over_from_copies(folder):
    for before, after, steps in run_out(folder, "forward", "backward", SNAPSHOT_STEPS="1"):
        assert before != after and steps <= 1, "a step, and what was sent since the last copy"


@pytest.mark.rotating
def test_the_next_plan_takes_over_in_the_middle_of_a_step_and_before_the_first_copy(folder):
    ((_, _, after_copy),) = run_out(folder, "step", SNAPSHOT_STEPS="2")
    assert after_copy <= 3
    ((_, _, from_the_beginning),) = run_out(folder, "backward")
    assert from_the_beginning == 4, "of the steps before the one in which memory ran out"


@pytest.mark.rotating  # one more way each
@pytest.mark.parametrize("recovery", ["auto", "off"])
def test_the_next_plan_takes_over_from_the_copy_of_the_one_worker_that_ran_out_alone(folder, recovery):
    """The other one computes the forward, and waits in the backward for the one that does not come."""
    ((before, after, steps),) = run_out(folder, "alone", num_starts=2, MOREH_RECOVERY=recovery, FEW_COMMANDS="0")
    assert before != after and steps == 0


@pytest.mark.rotating  # one more way each
def test_by_default_the_next_plan_takes_over_before_there_is_a_copy(folder):
    ((before, after, steps),) = run_out(folder, "backward", MOREH_RECOVERY="auto")
    assert before != after and steps == 4


@pytest.mark.rotating  # one more way each
def test_with_a_plan_that_was_given_the_error_says_so(folder):
    with tempfile.TemporaryDirectory(prefix="fatal-") as fatal:
        known = {"MOREH_AP_CACHE": str(folder), "FATAL_FOLDER": fatal, "MOREH_RECOVERY": "memory"}
        with UserScript("out_of_memory_later.py", "forward", cwd=folder, PLAN="shard=2", **known) as script:
            assert script.wait() == 1
            assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n" in script.err
            assert "plan='shard=2', which the script asks for, ran out of memory" in script.err
            script.leaves_nothing()


@pytest.mark.rotating  # one more way each
def test_the_run_goes_on_with_fewer_devices_where_one_is_gone_until_it_is_there_again(folder):
    with tempfile.TemporaryDirectory(prefix="fatal-") as fatal:
        known = {"MOREH_AP_CACHE": str(folder), "FATAL_FOLDER": fatal, "MOREH_RECOVERY": "memory"}
        known |= {"SNAPSHOT_STEPS": "1", "MOREH_ELASTIC": "1"}
        with UserScript("out_of_memory_later.py", "gone", cwd=folder, **known) as script:
            out = script.succeed(timeout_s=280)
            script.leaves_nothing()
    found = re.search(r"^gone: (\d+) values, largest difference (\S+)$", out, re.MULTILINE)
    assert found and int(found[1]) > 20 and float(found[2]) < 1e-5, out
    line, later = [line for line in out.splitlines() if "took over" in line]
    assert re.fullmatch(
        r"\[info\] Worker 1 of 2 \(process \d+\) died: killed by signal 9, Killed\. No others can be started: "
        r"Worker 1 cannot be started: its device is gone\. "
        r'Others took over with plan="replicate=1[^"]*": \d+ steps? (was|were) computed again, \d+\.\d s',
        line,
    ), line
    assert re.fullmatch(
        r"\[info\] 2 workers on this machine again, 1 since a device was gone\. "
        r'Others took over with plan="[^"]+": \d+ steps? (was|were) computed again, \d+\.\d s',
        later,
    ), later
