"""Hosts for tests: network namespaces with a real sshd where root, `ip` and sshd are there, else agents on loopback.

Host b has a folder of its own where the others share one: an empty file system is mounted there. Nothing of a lab is
left, even of one whose process was killed: the next lab removes it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

SSHD = "/usr/sbin/sshd"
DAEMONS = ("sshd:", SSHD, "sh -c", "slurmd", "slurmstepd", "unshare")
NETWORK = "10.78.0"
ADDRESSES = {name: f"{NETWORK}.{number}" for number, name in enumerate("cabde", 1)}
ROOT = Path(__file__).parents[2]
MISSING = [
    text
    for text, is_missing in (
        ("root", os.geteuid() != 0),
        ("the program `ip` (apt-get install iproute2)", shutil.which("ip") is None),
        ("sshd (apt-get install openssh-server)", not os.path.exists(SSHD)),
        ("network namespaces", os.geteuid() != 0 or bool(subprocess.run(["unshare", "-n", "true"]).returncode)),
    )
    if is_missing
]
"""Why there can be no namespaces."""

MISSING_FOR_SLURM = (
    MISSING
    + [
        f"{program} (apt-get install --no-install-recommends slurmctld slurmd slurm-client munge)"
        for program in ("slurmctld", "slurmd", "srun", "munged")
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None
    ][:1]
)
"""Why there can be no Slurm."""

_NAME = re.compile(r"mlab(\d+)-(\d+)-(sw|[cabde])\b")
_NUMBERS = itertools.count()


class Lab:
    """Hosts `a`, `b` and, if wanted, `d` and `e`, and a controller, `c`, on one bridge.

    Args:
        names: The hosts.
        sshd: Further lines of the configuration of a host's sshd.

    Attributes:
        names: The hosts.
        hosts: What a script is given.
        private: A folder that `a` and `c` share, and of which `b` sees nothing.
        shared: A folder that all share.
    """

    def __init__(self, names: str = "ab", sshd: Mapping[str, str] | None = None) -> None:
        self._remove_abandoned()
        self._prefix = f"mlab{os.getpid()}-{next(_NUMBERS)}-"
        self.names, self._sshd = names, sshd or {}
        self.folder = Path(tempfile.mkdtemp(prefix=f"mlab{os.getpid()}-"))
        self.private, self.shared = self.folder / "private", self.folder / "shared"
        self.private.mkdir()
        self.shared.mkdir()
        self.hosts = ",".join(ADDRESSES[name] for name in names)
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._names: dict[str, str] = {}
        self._slurm: dict[str, str] = {}
        try:
            self._make_network()
            self._make_keys()
            for host in names:
                self._start_sshd(host)
        except BaseException:
            self.close()
            raise

    def namespace(self, host: str) -> str:
        """Returns the network namespace of a host."""
        return f"{self._prefix}{host}"

    def slow_down(self, host: str, mbit: int) -> str:
        """Limits what a host sends; returns by what: netem where the kernel has it, else a token bucket."""
        add = ["tc", "-n", self.namespace(host), "qdisc", "replace", "dev", "eth0", "root"]
        netem = subprocess.run([*add, "netem", "rate", f"{mbit}mbit", "delay", "1ms"], capture_output=True)
        if netem.returncode == 0:
            return f"netem, {mbit} Mbit/s and 1 ms"
        subprocess.run([*add, "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms"], check=True)
        return f"tbf, {mbit} Mbit/s"

    def environment(self) -> dict[str, str]:
        """Returns what a script of the controller has in its environment."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MOREH_")}
        return {
            **kept,
            "MOREH_HOSTS": self.hosts,
            "MOREH_SSH": f"ssh -F {self.folder}/ssh_config",
            "MOREH_AP_CACHE": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": str(ROOT),
        }

    def start(
        self,
        *arguments: object,
        host: str = "c",
        cwd: Path | None = None,
        within: tuple[str, ...] = (),
        **variables: str,
    ) -> subprocess.Popen:
        """Starts Python on a host, within another program if one is given."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *within, sys.executable, *map(str, arguments)],
            cwd=cwd or self.shared,
            env={**self.environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: object, timeout_s: float = 240.0, **others: object) -> tuple[int, str]:
        """Runs Python to its end; returns its exit code and what it printed. Fails with that if it takes too long."""
        process = self.start(*arguments, **others)
        try:
            said = said_by(process, timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said

    def processes(self, host: str) -> list[int]:
        """Returns the processes on a host, without its sshd and slurmd."""
        said = subprocess.run(["ip", "netns", "pids", self.namespace(host)], capture_output=True, text=True, check=True)
        found = [int(pid) for pid in said.stdout.split()]
        return [pid for pid in found if not _command(pid).startswith(DAEMONS)]

    def wait_until_empty(self, timeout_s: float = 10.0) -> dict[str, list[str]]:
        """Waits until no host runs anything but sshd; returns what is left."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left = {host: [_command(pid) for pid in self.processes(host)] for host in self.names}
            if not any(left.values()) or time.monotonic() > deadline_s:
                return {host: commands for host, commands in left.items() if commands}
            time.sleep(0.1)

    def close(self) -> None:
        """Ends everything of the lab."""
        for daemon in self._daemons:
            daemon.kill()
        self._remove(self._prefix)
        for daemon in self._daemons:
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make_network(self) -> None:
        switch = self.namespace("sw")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in ("c", *self.names):
            name, address = self.namespace(host), ADDRESSES[host]
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"v{host}", "netns", switch)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", switch, "link", "set", f"v{host}", "master", "br0", "up")

    def _make_keys(self) -> None:
        for name in ("user", "host"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True)
        public = (self.folder / "host.pub").read_text()
        known = "".join(f"[{ADDRESSES[host]}]:2222 {public}" for host in self.names)
        (self.folder / "known_hosts").write_text(known)
        (self.folder / "sshd_config").write_text(
            f"Port 2222\nHostKey {self.folder}/host\nAuthorizedKeysFile {self.folder}/user.pub\n"
            "PasswordAuthentication no\nPidFile none\nStrictModes no\nUsePAM no\n"
        )
        (self.folder / "ssh_config").write_text(
            f"Host *\n Port 2222\n IdentityFile {self.folder}/user\n UserKnownHostsFile {self.folder}/known_hosts\n"
        )

    def _start_sshd(self, host: str) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd does not start without its folder
        mount = f"mount -t tmpfs none {self.private} && " if host == "b" else ""  # seen in this namespace alone
        configuration = self.folder / f"sshd_config-{host}"
        configuration.write_text((self.folder / "sshd_config").read_text() + self._sshd.get(host, ""))
        command = ["sh", "-c", f"{mount}exec {SSHD} -f {configuration} -D -e"]
        self._start_daemon(f"sshd-{host}", host, command, "listening")

    def _start_daemon(self, name: str, host: str, command: list[str], ready: str) -> None:
        log = self.folder / f"{name}.log"
        with open(log, "wb") as said:
            self._daemons.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", self.namespace(host), *command],
                    stdout=said,
                    stderr=said,
                    env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")},
                )
            )
        deadline_s = time.monotonic() + 15.0
        while ready not in log.read_text():
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)

    def name_hosts(self, names: dict[str, str]) -> None:
        """Has all hosts know the address of each name."""
        self._names.update(names)
        lines = "".join(f"{address} {name}\n" for name, address in self._names.items())
        for host in ("c", *self.names):
            folder = Path("/etc/netns", self.namespace(host))  # `ip netns exec` shows it as /etc/hosts
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")

    def start_slurm(self) -> dict[str, str]:
        """Starts Slurm on all hosts, unless it runs; returns the variables that its programs need."""
        if self._slurm:
            return self._slurm
        self.name_hosts({f"mlab{host}": address for host, address in ADDRESSES.items()})
        nodes = "".join(f"NodeName=mlab{host} NodeAddr={ADDRESSES[host]} CPUs=2 RealMemory=4000\n" for host in "ab")
        own = self.folder
        (own / "munge.key").write_bytes(os.urandom(1024))
        (own / "munge.key").chmod(0o400)
        own.chmod(0o755)
        (own / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\n")
        (own / "slurm.conf").write_text(
            f"ClusterName=mlab\nSlurmctldHost=mlabc({ADDRESSES['c']})\nSlurmUser=root\n"
            f"AuthType=auth/munge\nAuthInfo=socket={own}/munge.socket\n"
            f"SlurmctldPidFile={own}/ctld.pid\nSlurmdPidFile={own}/slurmd-%n.pid\n"
            f"SlurmdSpoolDir={own}/spool-%n\nStateSaveLocation={own}/state\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nReturnToService=2\n"
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n"
            f"{nodes}PartitionName=all Nodes=mlaba,mlabb Default=YES MaxTime=INFINITE State=UP\n"
        )
        names = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        files = ("munge.socket", "munge.key", "munge.pid", "munge.log", "munge.seed")
        options = [f"--{name}={own}/{file}" for name, file in zip(names, files)]
        self._start_daemon("munged", "c", ["/usr/sbin/munged", "--foreground", "--force", *options], "Created socket")
        for program, host in (("slurmctld", "c"), ("slurmd", "a"), ("slurmd", "b")):
            node = f" -N mlab{host}" if program == "slurmd" else ""
            command = ["unshare", "--uts", "sh", "-c", f"hostname mlab{host}; exec {program} -D{node}"]
            self._start_daemon(f"{program}-{host}", host, command, "Running as primary" if not node else "started on")
        self._slurm = {"SLURM_CONF": f"{own}/slurm.conf", "MOREH_HOSTS": "slurm"}
        return self._slurm

    def _remove_abandoned(self) -> None:
        for line in _ip("netns", "list").splitlines():
            found = _NAME.match(line)
            if found is not None and not os.path.exists(f"/proc/{found[1]}"):
                self._remove(found[0].removesuffix(found[3]))
        for folder in Path(tempfile.gettempdir()).glob("mlab*-*"):
            if not os.path.exists(f"/proc/{folder.name[4:].partition('-')[0]}"):
                shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def _remove(prefix: str) -> None:
        names = [line.split()[0] for line in _ip("netns", "list").splitlines() if line.startswith(prefix)]
        for name in names:
            for pid in _ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
        with contextlib.suppress(OSError):  # it is not there, or another one's are in it
            os.rmdir("/etc/netns")


def said_by(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Returns what a process prints to its end; fails with that, and with its stacks, if it takes too long."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # Python prints the stacks of all threads
        said, _ = process.communicate(timeout=30.0)
        raise AssertionError(f"still running after {timeout_s:.0f} s\n{said}") from None


def output_until(process: subprocess.Popen[str], text: str, timeout_s: float = 120.0) -> str:
    """Returns what a process prints until it has printed a text; fails with that if it ends, or takes too long."""
    said, abort = "", threading.Timer(timeout_s, process.send_signal, (signal.SIGABRT,))
    abort.start()
    try:
        while text not in said:
            line = process.stdout.readline() if process.stdout else ""
            said += line
            assert line, f"no {text!r} within {timeout_s:.0f} s\n{said}"
    finally:
        abort.cancel()
    return said


@contextlib.contextmanager
def loopback_agents(
    folder: Path, num_hosts: int = 2, num_cores: int | None = None, first: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Has so many agents that were started by hand on this machine, each with so many of its cores, and the first one
    with other variables; gives the file with their lines."""
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    command = [sys.executable, "-m", "moreh_ap.cli.main", "host", "--address", "127.0.0.1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    agents = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env={**environment, **(first if first and index == 0 else {})},
            text=True,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        for index in range(num_hosts)
    ]
    try:
        (folder / "hosts").write_text("".join(agent.stdout.readline() for agent in agents if agent.stdout))
        yield str(folder / "hosts")
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip() or "sshd: [ended]"
    except OSError:
        return "sshd: [ended]"
