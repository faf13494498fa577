"""Workers that run out of memory: the next plan is taken with nothing lost, and the next run knows."""

import json
import re
import shutil

import pytest
from user_script import UserScript

from moreh_ap.session.planning.machine_profile import FILE

pytestmark = pytest.mark.rotating  # one more moment at which memory runs out each


def run(folder, *arguments):
    """Returns losses and errors of the script, and what it printed."""
    with UserScript("out_of_memory.py", *arguments, cwd=folder, MOREH_AP_CACHE=str(folder)) as script:
        out = script.succeed()
    return json.loads(out.splitlines()[-1]), out


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """The machine's rates, so that they are measured once."""
    if FILE.path.exists():
        return FILE.path
    folder = tmp_path_factory.mktemp("machine")
    run(folder, "forward", 8)
    return folder / FILE.path.name


@pytest.fixture
def folder(tmp_path, machine):
    """A folder of a test of its own, in which no plan has run out of memory yet."""
    shutil.copy(machine, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of one process."""
    return run(tmp_path_factory.mktemp("one"), "never")[0]["losses"]


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_the_next_plan_is_taken_with_the_state_as_it_was(folder, expected, where):
    """In "backward" one of two workers fails, and the other waits for it in a collective."""
    found, out = run(folder, where)
    assert found["errors"] == []
    assert found["losses"] == pytest.approx(expected, rel=1e-5)
    assert re.search(r'plan="\w+=2" ran out of memory: CUDA out of memory\. Tried to allocate 2\.00 GiB\.\n', out)
    assert "the next that fits" in out
    if where == "forward":
        again, out = run(folder, where)
        assert again["losses"] == pytest.approx(expected, rel=1e-5)
        assert "ran out of memory" not in out, "the second run knows of the first"


def test_where_no_plan_is_left_the_error_says_what_would_fit_and_the_script_can_go_on(folder, expected):
    found, _ = run(folder, "given")
    assert found["losses"] == pytest.approx(expected, rel=1e-5)
    assert len(found["errors"]) == len(expected), "a plan that the script asks for is not left"
    fact, *lines = found["errors"][0].splitlines()
    assert fact == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert "plan='replicate=2', which the script asks for" in lines[0]
    assert [line.partition(":")[0] for line in lines[1:]] == ["Allowed", "Try", "See"]


def test_after_the_first_step_the_error_is_explained_and_remembered(folder):
    found, _ = run(folder, "later")
    assert len(found["losses"]) == 3
    assert "ran out of memory after the first step" in found["errors"][0]
    again, _ = run(folder, "later")
    assert again["errors"] == [] and len(again["losses"]) == 6


def test_plans_are_tried_and_one_that_runs_out_is_not_kept(folder, expected):
    found, out = run(folder, "tuned", 3)
    assert found["errors"] == []
    assert found["losses"] == pytest.approx(expected, rel=1e-5)
    assert out.count("ran out of memory") >= 1
