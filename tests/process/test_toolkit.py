"""The command-line tools beside jobs that run: what they show, what they end, and what broken links are called."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest
from user_script import UserScript

from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.toolkit.findings import FAILED, OK
from moreh_ap.toolkit.link_checks import check_links

pytestmark = pytest.mark.rotating  # one more command or fault each

SCRIPT = "train_forever.py"
TRAINING = "step 10 "


def tool(tmp_path, name: str, *arguments: str, text: str = "", code: int = 0) -> str:
    """Returns what a tool printed."""
    module = {"moreh-ap": "moreh_ap.cli.main", "moreh-smi": "moreh_ap.toolkit.smi"}.get(name)
    module = module or "moreh_ap.toolkit.switch_model"
    with UserScript("-m", module, *arguments, cwd=tmp_path, text=text, **{FOLDER_VARIABLE: str(tmp_path)}) as run:
        assert run.wait() == code, run.out + run.err
        run.leaves_nothing()
        return run.out


def test_a_job_takes_the_chosen_model_is_shown_and_after_a_kill_is_gone(tmp_path):
    assert 'successfully switched to  "CPU.1"' in tool(tmp_path, "moreh-switch-model", text="CPU.1\nq\n")
    with UserScript(SCRIPT, cwd=tmp_path, **{FOLDER_VARIABLE: str(tmp_path)}) as script:
        script.wait_for_output(TRAINING)
        assert set(script.workers()) == {0}, "one worker, as chosen"
        seen = json.loads(tool(tmp_path, "moreh-smi", "--json"))
        (job,) = seen["jobs"]
        assert f"Moreh Job ID: {job['job_id']}\n" in script.out
        assert job["pid"] == script.process.pid and job["process"].endswith(SCRIPT)
        assert (job["devices"], job["model"]) == (1, "Sequential")
        assert f'plan="{job["plan"]}"' in script.out
        (worker,) = job["workers"]
        assert worker["pid"] == script.workers()[0]
        resident = psutil.Process(worker["pid"]).memory_info().rss
        assert 0.3 * resident < worker["used_bytes"] <= 1.2 * resident
        (accelerator,) = seen["accelerators"]
        assert accelerator["model"] == "CPU.1" and accelerator["used_bytes"] == worker["used_bytes"]
        assert 0 < accelerator["utilization_percent"] <= 100, "it trains"
        table = tool(tmp_path, "moreh-smi")
        assert "Processes:" in table and f" {job['job_id']} " in table
        os.kill(script.process.pid, signal.SIGKILL)
        script.process.wait()
        script.leaves_nothing()
        table = tool(tmp_path, "moreh-smi")
        assert "Processes:" not in table and " - |" in table
        assert not list((tmp_path / "jobs").iterdir())


def test_c26_reset_ends_a_job_that_does_not_answer(tmp_path):
    """A stopped process takes no polite signal, and its workers do not notice anything."""
    variables = {FOLDER_VARIABLE: str(tmp_path), "MOREH_NUM_DEVICES": "1"}
    with UserScript(SCRIPT, cwd=tmp_path, **variables) as script:
        script.wait_for_output(TRAINING)
        os.kill(script.process.pid, signal.SIGSTOP)
        assert "Nothing was ended" in tool(tmp_path, "moreh-smi", "--reset", text="n\n", code=1)
        tool(tmp_path, "moreh-smi", "--reset", code=1)  # nobody answers
        assert script.process.poll() is None and script.workers()
        said = tool(tmp_path, "moreh-smi", "--reset", "--yes")
        assert f"Job {script.process.pid} was ended." in said
        assert script.wait(timeout_s=5) == -signal.SIGKILL
        script.leaves_nothing()
        assert json.loads(tool(tmp_path, "moreh-smi", "--json"))["jobs"] == []


def test_doctor_finds_nothing_wrong_with_working_links(tmp_path):
    found = json.loads(tool(tmp_path, "moreh-ap", "doctor", "--devices", "2", "--json"))
    status = {check["name"]: check["status"] for check in found["checks"]}
    assert found["ok"] and (status["workers"], status["links"], status["collectives"]) == (OK, OK, OK)


def faults(executor: str, timeout_s: float) -> dict[str, list[str]]:
    """Returns what was said of each check that failed, once no worker is left."""
    before = set(psutil.Process().children(recursive=True))
    found = list(check_links("cpu", 2, timeout_s, f"toolkit_faults:{executor}"))
    deadline_s = time.monotonic() + 10
    while (left := set(psutil.Process().children(recursive=True)) - before) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not left
    assert all(finding.fix for finding in found if finding.status == FAILED)
    said = {finding.name: [] for finding in found}
    for finding in found:
        said[finding.name] += [finding.found] if finding.status == FAILED else []
    return said


def test_c6_wrong_values_are_reported_with_the_link():
    said = faults("Wrong", 60)
    assert said == {
        "workers": [],
        "links": [
            "worker 1 to worker 0: 2 of 262160 values wrong on worker 0, for example element 8 of 16 is 43, not 42"
        ],
        "collectives": [
            "all_reduce: 262160 of 262160 values wrong on worker 1, for example element 0 of 16 is 0, not 3",
        ],
    }


@pytest.mark.parametrize(
    ("executor", "said"),
    [("Hanging", "worker 0 to worker 1: no answer within 4 s"), ("Dying", "worker 1 to worker 0: WorkerLostError: ")],
)
def test_c6_a_link_that_hangs_or_kills_is_reported_and_the_others_are_tried(executor, said):
    found = faults(executor, 4 if executor == "Hanging" else 60)
    assert len(found["links"]) == 1 and found["links"][0].startswith(said)
    assert found["collectives"] == [], "the next workers are new ones"
