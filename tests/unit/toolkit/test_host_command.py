"""`moreh-ap host`: what is said of arguments that are wrong. `test_host_listener.py` lets scripts in."""

from __future__ import annotations

import argparse

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.hosts.credentials import AgentSecret
from moreh_ap.hosts.reachability import free_port
from moreh_ap.runtime.host.host_listener import HostListener
from moreh_ap.toolkit import host_command


@pytest.fixture
def run(monkeypatch):
    """Runs the command on a machine with two addresses and loopback."""
    monkeypatch.setattr(host_command, "interfaces", lambda: {"127.0.0.1": "lo", "192.0.2.2": "eth0", "fd00::2": "eth0"})

    def run(*words):
        parser = argparse.ArgumentParser()
        host_command.add_arguments(parser)
        return host_command.run(parser.parse_args(words), [])

    return run


@pytest.mark.parametrize(
    "words, said, fix",
    [
        ([], "This machine has 2 addresses: 192.0.2.2, fd00::2", "moreh-ap host --address 192.0.2.2"),
        (
            ["--address", "198.51.100.7"],
            "--address 198.51.100.7 --port 0: [Errno 99] Cannot assign requested address",
            "moreh-ap host --address 192.0.2.2",
        ),
        (["--address", "127.0.0.1", "--port", "99999"], "port must be 0-65535", "moreh-ap host --address 192.0.2.2"),
        (
            ["--address", "127.0.0.1", "--secret", "/no/folder"],
            "--secret /no/folder: [Errno 2] No such file or directory",
            "moreh-ap host --port 40123 --secret agent-secret",
        ),
    ],
)
def test_an_argument_that_is_wrong_is_named_with_what_is_right(run, words, said, fix):
    with pytest.raises(OptionError) as raised:
        run(*words)
    assert said in raised.value.fact and "while attempting" not in raised.value.fact
    assert raised.value.fix == fix and raised.value.allowed


def test_a_secret_is_made_once_and_its_line_is_printed_then_alone(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(HostListener, "serve", HostListener.close)
    folder, port = tmp_path / "kept", free_port("127.0.0.1")
    words = ["--address", "127.0.0.1", "--port", str(port), "--secret", str(folder)]
    taken = ["--address", "198.51.100.7", *words[2:]]
    with pytest.raises(OptionError, match="Cannot assign"):
        run(*taken)
    assert not folder.exists(), "nobody has seen its line"
    assert run(*words) == 0
    line = capsys.readouterr().out.strip()
    assert line == AgentSecret.from_folder(str(folder)).line("127.0.0.1", port)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "certificate": 0o600, "key": 0o600, "token": 0o600,
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == [folder]
    assert run(*words) == 0
    assert capsys.readouterr().out == f"listening at 127.0.0.1:{port}\n"
    assert line == AgentSecret.from_folder(str(folder)).line("127.0.0.1", port)
    with pytest.raises(OSError, match="not empty"):
        AgentSecret.from_folder(str(folder)).to_folder(str(folder))
    assert list(tmp_path.iterdir()) == [folder]
