"""Four hosts, of which one is behind a slow link and another has a wrong clock: a tutorial, from one command."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_lab import ADDRESSES, MISSING, Lab, output_until
from tutorial_files import make_tutorial_files

WITHOUT = MISSING + [f"the program `{one}`" for one in ("tc", "cc") if shutil.which(one) is None]
SCRIPT = Path(__file__).parents[2] / "tutorials" / "train_llama2.py"
FLAGS = ["--embedded", "--epoch", "2", "--max-steps", "3", "--batch-size", "8", "--lr", "1e-3", "--log-interval", "1",
         "--eval-rows", "6", "--sample-tokens", "0", "--block-size", "64"]  # fmt: skip
SLOW, WRONG = "d", "b"
SLOW_MBIT = 200
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*original)(clockid_t, struct timespec *);
    static long ahead_s = -1;
    if (!original) original = dlsym(RTLD_NEXT, "clock_gettime");
    if (ahead_s < 0) {
        FILE *file = fopen("AHEAD", "r");
        if (!file || fscanf(file, "%ld", &ahead_s) != 1) ahead_s = 0;
        if (file) fclose(file);
    }
    int result = original(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += ahead_s;
    return result;
}
"""
"""A library for LD_PRELOAD that puts the clock ahead by the seconds in a file."""

pytestmark = [
    pytest.mark.rotating,  # more hosts
    pytest.mark.skipif(bool(WITHOUT), reason=f"needs {', '.join(WITHOUT)}"),
]


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Lab]:
    """Four hosts; the seconds in the file `ahead` are those of the wrong clock."""
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(CLOCK.replace("AHEAD", str(tmp_path / "ahead")))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    made = Lab("abde", sshd={WRONG: f"SetEnv LD_PRELOAD={library}\n"})
    try:
        made.slow_down(SLOW, SLOW_MBIT)
        yield made
    finally:
        made.close()


def test_train_llama2_on_four_hosts_with_a_slow_link_and_a_wrong_clock(four, tmp_path):
    make_tutorial_files(tmp_path)
    files = ["--model", tmp_path / "llama", "--dataset", tmp_path / "summaries"]
    (tmp_path / "ahead").write_text("300")
    code, said = four.run("-c", "import torch; torch.moreh.option.enable_advanced_parallelization()")
    assert code == 1 and f"{ADDRESSES[WRONG]}, clock:" in said and "sudo chronyc makestep" in said, said
    assert f"MeshStartError: The host {ADDRESSES[WRONG]} cannot join: clock: +300" in said, said
    (tmp_path / "ahead").write_text("8")  # joins, as less than 10 s
    command = [SCRIPT, *FLAGS, *files, "--devices", "4", "--plan", "pipeline=4", "--save-path", tmp_path / "hosts"]
    script = four.start(*command)
    said = output_until(script, 'plan="pipeline=4')
    workers = [pid for pid in four.processes(WRONG) if "warm_program" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert workers and all("clock.so" in Path(f"/proc/{pid}/maps").read_text() for pid in workers)
    more, _ = script.communicate(timeout=200)
    assert script.returncode == 0, said + more
    assert four.wait_until_empty() == {}
    code, said = four.run(SCRIPT, *FLAGS, *files, "--no-ap", "--save-path", tmp_path / "alone", MOREH_HOSTS="")
    assert code == 0, said
    found, expected = (json.loads((tmp_path / part / "losses.json").read_text()) for part in ("hosts", "alone"))
    assert len(expected["losses"]) == 3
    for name in ("losses", "held_out_before", "held_out_after"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
