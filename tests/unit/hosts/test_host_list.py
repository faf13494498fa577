"""Hosts as a person writes them."""

from __future__ import annotations

import os

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.hosts.host_list import by_hand, file_of_hosts, parse_hosts, public_name

LINE = f"tls://10.0.0.2:4000/{'a1' * 32}/{'T' * 43}"


@pytest.mark.parametrize("given", ["node1,node2", " node1 , node2 ", ["node1", "node2"], ("node1", "node2")])
def test_a_list_and_a_text_name_the_same_hosts(given):
    assert parse_hosts(given) == ("node1", "node2")


def test_a_file_has_a_host_in_each_line_and_remarks(tmp_path):
    (tmp_path / "hosts").write_text(f"# ours\nme@node1\n\n{LINE}  # by hand\n")
    assert parse_hosts(str(tmp_path / "hosts")) == ("me@node1", LINE)


def test_which_file_names_the_hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("hosts", "slurm"):
        (tmp_path / name).write_text("node1\n")
    assert file_of_hosts("hosts") == str(tmp_path / "hosts"), "scripts may go to another folder"
    assert [file_of_hosts(given) for given in ("node1", "node1,node2", "slurm", ["hosts"], None, "")] == [""] * 6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "hosts=3 (int)"),
        ([1, 2], "hosts=[1, 2] (list)"),
        ("", "names no host"),
        ("node1,node1", "names node1 more than once"),
        ("localhost,node1,127.0.0.1", "names this machine more than once: localhost, 127.0.0.1"),
        ("-oProxyCommand=reboot", "'-oProxyCommand=reboot' is no host"),
        ("node1;reboot", "is no host"),
        ("$(reboot)", "is no host"),
        ("tls://10.0.0.2:4000", "the line of an agent at '10.0.0.2:4000' is not whole"),
        ("hosts.txt", f"hosts='hosts.txt': there is no file {os.getcwd()}/hosts.txt"),
        ("/no/hosts.txt", "there is no file /no/hosts.txt"),
        ("node1,me@node2:2222", "hosts: 'me@node2:2222' has a port"),
    ],
)
def test_what_is_no_host_is_refused(given, said):
    with pytest.raises(OptionError) as caught:
        parse_hosts(given)
    assert said in caught.value.fact
    assert caught.value.allowed and caught.value.fix


def test_a_file_that_is_no_text_says_so(tmp_path):
    (tmp_path / "hosts").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="cannot be read as a list of hosts: 'utf-8' codec"):
        parse_hosts(str(tmp_path / "hosts"))


@pytest.mark.parametrize(
    "name, fix",
    [
        ("--hosts", "moreh-ap doctor --hosts node1,node2"),
        ("environment: MOREH_HOSTS", "export MOREH_HOSTS=node1,node2"),
        ("hosts", 'torch.moreh.option.enable_advanced_parallelization(hosts=["node1", "node2"])'),
    ],
)
def test_the_line_to_paste_is_of_the_kind_that_was_wrong(name, fix):
    with pytest.raises(OptionError, match="names no host") as caught:
        parse_hosts("", name)
    assert caught.value.fix == fix


def test_addresses_and_names_with_colons_and_dots_are_hosts():
    assert parse_hosts("fe80::1%eth0,::1,node1.example.com") == ("fe80::1%eth0", "::1", "node1.example.com")


def test_a_port_belongs_to_ssh():
    with pytest.raises(OptionError) as caught:
        parse_hosts(["node1:2222"])
    assert caught.value.fix == 'export MOREH_SSH="ssh -p 2222"'


def test_a_log_never_has_the_secrets_of_a_line():
    assert public_name(LINE) == "10.0.0.2:4000"
    assert by_hand(LINE) == ("10.0.0.2", 4000, "a1" * 32, "T" * 43)
    with pytest.raises(OptionError) as caught:
        parse_hosts([LINE, LINE])
    assert "T" * 43 not in str(caught.value)
    with pytest.raises(OptionError) as caught:
        parse_hosts(f"{LINE}!")
    assert "T" * 43 not in str(caught.value)
