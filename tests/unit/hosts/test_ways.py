"""How an agent is reached."""

from __future__ import annotations

import shlex
import subprocess
import sys

from moreh_ap.hosts.reachability import Probe, reaches
from moreh_ap.hosts.ways import AGENT, ENGINE_BANNER, ProcessWay, remote_command, ssh_command


def test_ssh_asks_nothing_and_takes_the_host_for_no_option():
    command = ssh_command("node1", "ssh -F 'my config'")
    assert command[:3] == ["ssh", "-F", "my config"]
    assert command[-3:] == ["--", "node1", remote_command()] and "BatchMode=yes" in command


def test_the_same_python_runs_the_agent_there_in_any_shell():
    words = shlex.split(remote_command())
    assert words[:2] == ["exec", "env"] and words[-3:] == [sys.executable, "-m", AGENT]
    assert all("=" in word for word in words[2:-3])


def test_what_ssh_says_is_kept_for_the_error():
    way = ProcessWay([sys.executable, "-c", "import sys; sys.exit('Permission denied')"], {})
    assert way.reader.read() == b"" and way.last_words() == "Permission denied"
    way.close()


def test_what_the_engine_prints_in_every_process_is_no_reason():
    said = f"import sys; sys.exit('{ENGINE_BANNER} are being written to a file')"
    way = ProcessWay([sys.executable, "-c", said], {})
    assert way.reader.read() == b"" and way.last_words() == ""
    way.close()


def test_the_end_of_the_way_ends_its_process():
    way = ProcessWay([sys.executable, "-c", "import sys; sys.stdin.read()"], {})
    way.close()
    assert way._process.returncode == 0


def test_a_probe_is_reached_until_it_is_closed():
    probe = Probe("127.0.0.1")
    assert reaches("127.0.0.1", probe.port) == ""
    probe.close()
    assert "refused" in reaches("127.0.0.1", probe.port)


def test_a_host_can_say_what_it_has_before_anything_heavy_is_imported():
    code = f"import sys, {AGENT}; print(sorted({{'torch', 'monarch', 'cryptography'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
