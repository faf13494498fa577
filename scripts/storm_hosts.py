"""Two hosts for a storm: agents that were started by hand on this machine, which are killed and come back.

Decides how hosts are started, and what can befall a whole host. Must not know what is trained. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from storm_faults import GONE_WITHIN_S, OVER_WITHIN_S, Failed, Storm, Survived, Training

from moreh_ap.hosts.certificates import make_agent_secret
from moreh_ap.hosts.credentials import AgentSecret

ADDRESS = "127.0.0.1"
NUM_HOSTS = 2
_AGENT = "moreh_ap.runtime.host.remote_agent"
_AWAY_S = 2.0  # how long a host that was killed is away
_LISTENS_S = 30.0
_JOINED = " joined "


class Hosts:
    """Agents on loopback, each with a port and a secret that it keeps when it is started again.

    Args:
        folder: For the secrets, and for the file that names the hosts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listeners: list[subprocess.Popen[str]] = []
        self._ports: list[int] = []
        try:
            for index in range(NUM_HOSTS):
                secret = folder / f"secret{index}"
                secret.mkdir(mode=0o700, parents=True)
                for name, text in make_agent_secret().files().items():
                    (secret / name).write_text(text)
                self._ports.append(0)
                self._listeners.append(self._start(index))
        except BaseException:
            self.end()
            raise
        secrets = [AgentSecret.from_folder(str(folder / f"secret{index}")) for index in range(NUM_HOSTS)]
        lines = [secret.line(ADDRESS, port) for secret, port in zip(secrets, self._ports)]
        (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))

    def variables(self) -> dict[str, str]:
        """Returns what a script needs in its environment."""
        return {"MOREH_HOSTS": str(self._folder / "hosts"), "MOREH_ELASTIC": "1"}

    def pids(self) -> list[int]:
        """Returns the processes of which all on the hosts are descendants."""
        return [one.pid for one in self._listeners]

    def agents(self) -> list[psutil.Process]:
        """Returns the agents that serve a script."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(pid).children():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if _AGENT in child.cmdline():
                            found.append(child)
        return found

    def left(self) -> list[str]:
        """Waits until nothing of a script is on the hosts any more; returns what is."""
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while (found := self.agents()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return [f"agent {one.pid} of a host" for one in found]

    def kill(self, index: int) -> None:
        """Kills all processes of a host at once."""
        with contextlib.suppress(psutil.NoSuchProcess):
            listener = psutil.Process(self._listeners[index].pid)
            for one in [listener, *listener.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        self._listeners[index].wait()

    def come_back(self, index: int) -> None:
        """Starts a host again that was killed."""
        self._listeners[index] = self._start(index)

    def end(self) -> None:
        """Ends all hosts."""
        for index in range(len(self._listeners)):
            self.kill(index)

    def _start(self, index: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "moreh_ap.cli.main", "host", "--address", ADDRESS]
        command += ["--port", str(self._ports[index]), "--secret", str(self._folder / f"secret{index}")]
        listener = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,
        )
        assert listener.stdout is not None, "asked for"
        said = listener.stdout.readline()  # "listening at ADDRESS:PORT"
        port = said.strip().rpartition(":")[2]
        if not port.isdecimal():
            listener.kill()
            raise Failed(f"an agent does not listen: {said!r}, exit code {listener.wait()}")
        self._ports[index] = int(port)
        return listener


class StormOverHosts(Storm):
    """Has faults befall a training on two hosts; a host that is lost has come back before the next one.

    Args:
        training: The training, which lets hosts join.
        chance: Chooses workers, hosts and moments.
        hosts: Its hosts.
    """

    def __init__(self, training: Training, chance: random.Random, hosts: Hosts) -> None:
        super().__init__(training, chance)
        self._hosts = hosts

    def strike(self, kind: str) -> Survived:
        training = self._training
        joined = training.said(_JOINED)
        survived = super().strike(kind)
        if kind in OF_HOSTS:
            training.wait_for(lambda: training.said(_JOINED) > joined, OVER_WITHIN_S)
            count = len(training.lines)
            training.wait_for(lambda: len(training.lines) > count, OVER_WITHIN_S)
        return survived

    def _agent(self) -> float:
        self._rest(1.5)
        deadline_s = time.monotonic() + _LISTENS_S
        while len(agents := self._hosts.agents()) < NUM_HOSTS:
            if time.monotonic() > deadline_s:
                raise Failed(f"there are {len(agents)} agents: {self._training.last_words()}")
            time.sleep(0.05)
        began_s = time.monotonic()
        self._send(self._chance.choice(agents).pid, signal.SIGKILL)
        return began_s

    def _host(self) -> float:
        self._rest(1.5)
        index, began_s = self._chance.randrange(NUM_HOSTS), time.monotonic()
        self._last_s = began_s
        self._hosts.kill(index)
        time.sleep(_AWAY_S)
        self._hosts.come_back(index)
        return began_s


OF_HOSTS = {
    "agent": "SIGKILL of the agent of one of two hosts, and with it of the workers there; another one serves later",
    "host": "SIGKILL of everything on one of two hosts, which comes back after 2 s",
}
"""What can happen to a whole host."""

OF_WORKERS = ("anywhere", "two", "again", "stopped", "crash", "building", "saving", "loading", "generating")
"""What can happen on several hosts, too, of what `storm_faults.py` knows: the agents keep the copies there."""
