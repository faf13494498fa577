"""Workers that are silent: which of them hang, what is said of them, and how the training goes on.

`scripts/survive_losses.py` has a worker be silent in a forward. Here 4 s without progress count as a hang.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator

import pytest
from rotating import rotating_from
from user_script import UserScript

SCRIPT = "survive_losses.py"
STOPPED = r"has been stopped by a signal for \d s \(SIGSTOP\)"
IN_RECV = r"has waited in recv for \d s, which will never end \(worker 0 in \w+\)"


@pytest.fixture
def folders() -> Iterator[dict[str, str]]:
    """The folder of the script's faults, and settings."""
    with tempfile.TemporaryDirectory(prefix="fatal-") as fatal:
        yield {"FATAL_FOLDER": fatal, "MOREH_RECOVERY": "memory", "HANG_S": "4"}


def stacks_in(out: str) -> dict[int, str]:
    """Returns what the log has of each worker's stacks."""
    found = re.findall(
        r"^\[warning\] Worker (\d) of 2 \(process \d+\), its Python stacks:\n(.*?)(?=^\[|\Z)", out, re.M | re.S
    )
    return {int(rank): text for rank, text in found}


@pytest.mark.parametrize(
    "plan, fault, how",
    rotating_from(1, [("shard=2", "stopped", STOPPED), ("replicate=2", "collective", r".*")]),
)
def test_a_worker_that_hangs_is_replaced_as_if_it_was_lost(folders, tmp_path, plan, fault, how):
    with UserScript(SCRIPT, plan, fault, cwd=tmp_path, **folders) as script:
        out = script.succeed(timeout_s=200)
    found = re.search(rf"^{fault}: (\d+) of (\d+) equal", out, re.M)
    assert found and int(found[1]) == int(found[2]) > 20, out
    assert re.search(rf"^\[info\] Worker \d of 2 \(process \d+\) {how}\..* Others took over: \d+ steps", out, re.M), out
    stacks = stacks_in(out)
    assert sorted(stacks) == [0, 1] and "survive_losses.py" in stacks[1] and "moreh_ap" in stacks[0]


@pytest.mark.rotating
@pytest.mark.parametrize("fault, how", [("stopped", STOPPED), ("collective", IN_RECV)])
def test_without_recovery_a_hang_is_an_error_that_names_the_worker(folders, tmp_path, fault, how):
    with UserScript(SCRIPT, "shard=2", fault, cwd=tmp_path, **{**folders, "MOREH_RECOVERY": "off"}) as script:
        assert script.wait(timeout_s=200) == 1
        assert re.search(
            rf"WorkerLostError: Worker \d of 2 \(process \d+\) (?:{how}|has waited in \w+ for)", script.err
        )
        assert sorted(stacks_in(script.out)) == [0, 1]
        script.leaves_nothing()


ENGINE_WAITS_S = "3s"
"""Instead of 60: for so long a process may be silent before the engine takes it for lost."""

ENGINE = {
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": ENGINE_WAITS_S,
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": ENGINE_WAITS_S,
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": ENGINE_WAITS_S,
}


@pytest.mark.rotating
def test_native_code_that_keeps_the_interpreters_lock_for_long_is_no_hang(folders, tmp_path):
    """12 s are three times and more what counts as for ever, ours and the engine's: 90 s of what a user has."""
    with UserScript(SCRIPT, "shard=2", "lock", cwd=tmp_path, **{**folders, **ENGINE, "LOCK_S": "12"}) as script:
        out = script.succeed(timeout_s=200)
    assert re.search(r"^lock: (\d+) of \1 equal", out, re.M), out
    assert "took over" not in out and "stacks" not in out
