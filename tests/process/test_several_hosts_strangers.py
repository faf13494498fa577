"""Nobody but the controller of a run makes the engine of a host do anything, even who knows its whole address."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from moreh_ap.hosts.certificates import make_credentials
from moreh_ap.hosts.channel import Message
from moreh_ap.hosts.credentials import Credentials
from moreh_ap.hosts.ways import reach
from moreh_ap.runtime.host.host_connection import HostConnection

STRANGER = Path(__file__).parent / "scripts" / "several_hosts_stranger.py"
HERE, ELSEWHERE = "127.0.0.1", "10.9.9.9"


@contextlib.contextmanager
def agent(credentials: Credentials) -> Iterator[str]:
    """Has an agent that serves; gives its whole address, with the random name that strangers do not know."""
    connection, serving = HostConnection("localhost", reach("localhost")), []

    def heard(message: Message) -> None:
        if message.kind == "serving":
            serving.append(message.values)

    try:
        connection.on_message = heard
        connection.await_report(60.0)
        connection.ask("listen", 10.0, address=HERE)
        connection.send(
            "serve",
            ranks=[0],
            start=1,
            copies=0,
            alive_s=5.0,
            credentials=asdict(credentials),
            working_folder="/",
            imports=[],
            environment={},
        )
        deadline_s = time.monotonic() + 60.0
        while not serving:
            assert time.monotonic() < deadline_s and connection.lost() is None, connection.lost()
            time.sleep(0.05)
        yield serving[0]["address"]
    finally:
        connection.end()


def start(address: str, shown: Credentials | None, folder: Path, answers: str = "tls://127.0.0.1:0"):
    """Starts a stranger, who shows something or nothing."""
    folder.mkdir()
    variables = {}
    if shown is not None:
        for name, text in (("CA", shown.authority), ("CERT", shown.certificate), ("KEY", shown.key)):
            (folder / name).write_text(text)
            variables[f"HYPERACTOR_TLS_{name}"] = str(folder / name)
    kept = {name: value for name, value in os.environ.items() if "TLS" not in name}
    return subprocess.Popen(
        [sys.executable, STRANGER, address, answers],
        env={**kept, **variables, "MONARCH_FILE_LOG": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def said(stranger: subprocess.Popen) -> str:
    try:
        return stranger.communicate(timeout=90)[0].strip()
    finally:
        stranger.kill()


def test_who_shows_no_certificate_of_the_run_gets_nowhere(tmp_path):
    run, foreign = make_credentials([HERE, ELSEWHERE]), make_credentials([HERE])
    with agent(run[HERE]) as address, agent(run[ELSEWHERE]) as misnamed:
        strangers = {
            "a foreign authority": start(address, foreign[HERE], tmp_path / "foreign"),
            "trusting the run, with a foreign key": start(
                address,
                Credentials(run[HERE].authority, foreign[HERE].certificate, foreign[HERE].key),
                tmp_path / "trusting",
            ),
            "no certificate": start(address, None, tmp_path / "none"),
            "plain tcp": start(address.replace("tls://", "tcp://"), None, tmp_path / "tcp", "tcp://127.0.0.1:0"),
            "a host with another address in its certificate": start(misnamed, run[HERE], tmp_path / "misnamed"),
        }
        for what, stranger in strangers.items():
            assert said(stranger).startswith("REFUSED"), what
        assert said(start(address, run[HERE], tmp_path / "ours")).startswith("RAN in"), "the attack itself works"
