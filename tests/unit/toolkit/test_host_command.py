"""`moreh-ap host`: what is said of arguments that are wrong. `test_host_listener.py` lets scripts in."""

from __future__ import annotations

import argparse

import pytest

from moreh_ap.errors import OptionError
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
            "moreh-ap launch kubernetes --nodes 2 --image IMAGE -- python train.py  # makes such a secret",
        ),
    ],
)
def test_an_argument_that_is_wrong_is_named_with_what_is_right(run, words, said, fix):
    with pytest.raises(OptionError) as raised:
        run(*words)
    assert said in raised.value.fact and "while attempting" not in raised.value.fact
    assert raised.value.fix == fix and raised.value.allowed
