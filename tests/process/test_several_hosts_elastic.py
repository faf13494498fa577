"""A host that is added to the file of hosts while a script trains, is lost and comes back: used, with the same numbers.

Two agents that were started by hand on loopback, each with two workers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hosts_lab import loopback_agents
from user_script import UserScript

HOST = r"127\.0\.0\.1:\d+"
AGAIN = r"\d+ steps? (?:was|were) computed again, \d+\.\d s"


def numbers_of(out: str) -> None:
    """Checks that the numbers are those of one process."""
    found = re.search(r"^(\d+) values, largest difference (\S+), of weights (\S+)$", out, re.MULTILINE)
    assert found and int(found[1]) > 10, out
    assert float(found[2]) < 1e-4 and float(found[3]) < 1e-4, found[0]


@pytest.mark.rotating
def test_fewer_workers_go_on_where_the_hosts_that_are_left_cannot_share_all_until_the_lost_one_is_back(tmp_path):
    with (
        loopback_agents(tmp_path, num_hosts=3, num_cores=1) as hosts,
        UserScript("join_hosts.py", hosts, cwd=tmp_path) as script,
    ):
        out = script.succeed(timeout_s=280)
        script.leaves_nothing()
    numbers_of(out)
    lost = (
        rf"The host {HOST} is lost, and the workers on it \(2\): [^.]+\. 3 workers cannot be dealt evenly to 2 hosts\."
    )
    back = rf"{HOST} joined {HOST}, {HOST}: 3 workers on 3 hosts, 2 on 2 before\."
    for expected in (lost, back):
        taken_over = rf'^\[info\] {expected} Others took over with plan="[^"]+": {AGAIN}$'
        assert len(re.findall(taken_over, out, re.MULTILINE)) == 1, f"{expected}\n{out}"
    assert out.count("MoAI Accelerator is ready") == 1


@pytest.mark.rotating
def test_hosts_that_join_and_come_back_are_used_with_the_numbers_of_one_process(tmp_path):
    with loopback_agents(tmp_path, num_cores=2) as hosts:
        first, second = Path(hosts).read_text().splitlines(keepends=True)
        used, more = tmp_path / "used", tmp_path / "more"
        used.write_text(first)
        more.write_text(second)
        with UserScript("join_hosts.py", used, more, cwd=tmp_path) as script:
            out = script.succeed(timeout_s=280)
            script.leaves_nothing()
    numbers_of(out)
    for expected in (
        rf"{HOST} can join over a link of [\d,]+ MB/s, and does so after the next copy of what workers hold",
        rf'{HOST} joined {HOST}: 4 workers on 2 hosts, 2 on 1 before\. Others took over with plan="[^"]+": {AGAIN}',
        rf"The host {HOST} is lost, and the workers on it \(2, 3\): [^.]+\. Others took over: {AGAIN}",
        rf"{HOST} joined {HOST}: 4 workers on 2 hosts, 4 on 1 before\. Others took over: {AGAIN}",
    ):
        count = 2 if "can join" in expected else 1
        assert len(re.findall(rf"^\[info\] {expected}$", out, re.MULTILINE)) == count, f"{expected}\n{out}"
    assert out.count("MoAI Accelerator is ready") == 1
    assert "tls://" not in out, "the secret of an agent"
