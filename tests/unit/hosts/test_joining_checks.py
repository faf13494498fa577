"""What a host has to be like, and what is said where it is not."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from moreh_ap.hosts import host_table
from moreh_ap.hosts.host_report import COMPARED_PACKAGES, HostReport, look
from moreh_ap.hosts.joining_checks import (
    ENDED,
    SILENT,
    Wanted,
    check_addresses,
    check_machines,
    check_report,
    error,
    not_taken,
    on_host,
    reached,
    unreachable,
)

LINE = f"tls://10.0.0.2:4000/{'a1' * 32}/{'T' * 43}"

PACKAGES = dict.fromkeys(("moreh_ap", *COMPARED_PACKAGES), "2.0")
GOOD = HostReport(
    python="3.11.7",
    executable="/env/bin/python",
    packages=PACKAGES,
    time_s=1000.0,
    gpus=("0", "1"),
    num_cores=8,
    free_memory_bytes=64 << 30,
    free_shared_memory_bytes=8 << 30,
    machine="one",
)


def wrong(report, *, host="node1", arrived_s=1000.1, delay_s=0.5, **wanted):
    rows = list(check_report(host, report, Wanted(GOOD, **wanted), arrived_s, delay_s))
    return {row.what: row for row in rows if not row.ok}


def test_an_equal_host_has_nothing_wrong():
    assert wrong(GOOD) == {}
    assert error(list(check_report("node1", GOOD, Wanted(GOOD), 1000.1, 0.5))) is None


@pytest.mark.parametrize(
    ("change", "what", "seen", "expected"),
    [
        ({"python": "3.12.1"}, "Python", "3.12.1", "3.11"),
        ({"packages": {**PACKAGES, "torch": "2.1"}}, "torch", "2.1", "2.0"),
        ({"packages": {**PACKAGES, "torchmonarch": ""}}, "torchmonarch", "missing", "2.0"),
        ({"packages": {**PACKAGES, "moreh_ap": "1.9"}}, "moreh_ap", "1.9", "2.0"),
        ({"time_s": 1075.0}, "clock", "+74.9 s", "within 10 s"),
        ({"time_s": 900.0}, "clock", "-99.6 s", "within 10 s"),
        ({"free_memory_bytes": 1 << 20}, "free memory", "1 MiB", "1.0 GiB for 2 workers"),
        ({"free_shared_memory_bytes": 1 << 20}, "free /dev/shm", "1 MiB", "64 MiB"),
    ],
)
def test_what_differs_is_said_with_both_values_and_a_line_to_paste(change, what, seen, expected):
    (row,) = wrong(replace(GOOD, **change)).values()
    assert (row.what, row.seen, row.expected) == (what, seen, expected)
    assert row.fix.startswith("ssh node1 ")
    said = error([row])
    assert said.fact == f"The host node1 cannot join: {what}: {seen}." and said.allowed == expected
    assert said.fix == row.fix


def test_too_few_gpus():
    assert wrong(GOOD, device_type="cuda", per_host=2) == {}
    row = wrong(GOOD, device_type="cuda", per_host=4)["devices"]
    assert (row.seen, row.expected) == ("2 GPUs", "4 GPUs")
    assert wrong(replace(GOOD, gpus=()), device_type="cuda", per_host=1)["devices"].seen == "0 GPUs"
    assert "devices" not in wrong(replace(GOOD, gpus=()), device_type="cpu", per_host=40)


def test_builds_of_a_version_and_patch_releases_of_python_go_together():
    torch = replace(GOOD, packages={**PACKAGES, "torch": "2.0+cu126"}, python="3.11.2")
    assert wrong(torch) == {}


def test_what_the_report_took_to_travel_is_no_difference_of_clocks():
    assert wrong(GOOD, arrived_s=1030.0, delay_s=31.0) == {}
    assert "clock" in wrong(GOOD, arrived_s=1030.0, delay_s=5.0)


def test_two_hosts_that_are_one_machine_cannot_share_gpus():
    hosts = [("node1", GOOD), ("node2", GOOD), ("node3", replace(GOOD, machine="two"))]
    assert [row.host for row in check_machines(hosts, "cuda")] == ["node2"]
    assert list(check_machines(hosts, "cpu")) == []


def test_a_line_to_paste_for_a_host_without_ssh_names_no_secret():
    rows = [unreachable(LINE, "refused"), *wrong(replace(GOOD, python="3.9.1"), host=LINE).values()]
    for row in rows:
        assert "T" * 43 not in repr(row) and row.fix.endswith(("# on that host", "# on 10.0.0.2:4000"))


def test_the_table_has_every_host_and_every_line():
    rows = [unreachable("node2", "No [route] to host"), *check_report("node1", GOOD, Wanted(GOOD), 1000.1, 0.5)]
    console = Console(file=io.StringIO(), width=200, markup=False)
    host_table.show(rows, console)
    said = console.file.getvalue()
    assert "✗ No [route] to host" in said and "node2, answer: ssh node2 true" in said and "torchmonarch" in said


def test_this_machine_says_what_it_has_without_importing_torch():
    found = look({"SSH_CONNECTION": "10.0.0.1 5000 10.0.0.2 22"})
    assert (found.address, found.controller_address) == ("10.0.0.2", "10.0.0.1")
    assert found.interfaces["127.0.0.1"].startswith("lo") and found.num_cores >= 1 and found.free_memory_bytes > 0
    assert set(found.packages) == {"moreh_ap", *COMPARED_PACKAGES} and found.packages["torch"]
    assert HostReport.of({**found.values(), "a fact of a later version": 1}) == found


def test_a_name_that_means_loopback_is_said_where_there_are_other_machines():
    assert not list(check_addresses([("a", "127.0.0.1"), ("b", "127.0.1.1")])), "all are this machine"
    assert not list(check_addresses([("a", "10.0.0.1"), ("b", "fe80::1%eth0")]))
    (row,) = check_addresses([("me@login", "127.0.1.1"), ("b", "10.0.0.2")])
    assert (row.host, row.what, row.ok) == ("me@login", "address", False)
    assert row.seen.startswith("127.0.1.1, a loopback address") and row.fix.startswith("getent hosts login  #")


@pytest.mark.parametrize(
    "target, fix",
    [
        ("controller", "sudo ufw allow from 10.0.0.2 to 10.0.0.9 proto tcp  # on this machine"),
        ("me@node3", 'ssh me@node3 "sudo ufw allow from 10.0.0.2 to 10.0.0.9 proto tcp"'),
        (LINE, "sudo ufw allow from 10.0.0.2 to 10.0.0.9 proto tcp  # on 10.0.0.2:4000"),
    ],
)
def test_a_host_that_is_not_reached_in_one_direction_names_it_and_where_to_open_the_firewall(target, fix):
    row = reached("node2", "reaches that one", "timed out", target, "10.0.0.2", "10.0.0.9")
    assert (row.seen, row.ok, row.fix) == ("timed out", False, fix)
    found = error([row])
    assert found.fact == "The host node2 cannot join: reaches that one: timed out." and found.fix == fix
    assert reached("node2", "reaches that one", "", target, "10.0.0.2", "10.0.0.9").ok


def test_a_full_disk_names_the_host_and_the_line_to_paste():
    row = not_taken("node2", "[Errno 28] No space left on device")
    assert "No space left" in row.seen and row.fix == "ssh node2 'df -h ${TMPDIR:-/tmp}'"
    assert on_host("localhost", "free -h") == "free -h" and on_host("n", "free -h") == 'ssh n "free -h"'


def test_a_name_that_stands_for_the_script_s_machine_is_said_to_be_no_firewall():
    row = unreachable("me@node2", "ssh: connect to host node2 port 22: Connection refused", "127.0.1.1")
    assert row.seen.startswith("127.0.1.1, a loopback address: only this machine itself is reached there (ssh: connect")
    assert (row.what, row.ok) == ("address", False) and row.fix.startswith("getent hosts node2  # correct /etc/hosts")


def test_a_host_whose_agent_is_slow_to_answer_has_its_load_looked_at():
    row = unreachable("node2", f"{SILENT} in 10 s: the host is busy")
    assert (row.ok, row.fix) == (False, "ssh node2 uptime  # then start again")
    assert unreachable("node2", "Permission denied").fix == "ssh node2 true"


@pytest.mark.parametrize(
    "reason, expected, command",
    [
        (f"env: '{sys.executable}': No such file or directory", "the same Python at the same path", "ls -l"),
        (f"env: '{sys.executable}': Permission denied", "the same Python at the same path", "ls -l"),
        (
            f"{sys.executable}: No module named moreh_ap",
            "this package in the same environment",
            "-m pip install 'moreh-ap==",
        ),
        (
            "Traceback\nOSError: [Errno 28] No space left on device: '/tmp/m'",
            "space in its folder for temporary files",
            "df",
        ),
        ("me@node2: Permission denied (publickey).", "ssh without a password", "ssh node2 true"),
    ],
)
def test_where_ssh_works_the_line_to_paste_is_about_what_failed_behind_it(reason, expected, command):
    row = unreachable("node2", reason)
    assert (row.ok, row.expected) == (False, expected) and command in row.fix and row.fix.startswith("ssh node2 ")


def test_an_agent_that_ends_the_connection_has_been_shown_another_line():
    row = unreachable(LINE, ENDED)
    assert "not the token of the line" in row.seen and row.fix == "moreh-ap host  # on that host"
