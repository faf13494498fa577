"""A training in a process of its own, and what befalls its workers.

Decides how each kind of fault comes about, at a moment that a generator of random numbers chooses, and when a training
has got over it. Must not know how many faults there are, nor what is said of them. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from moreh_ap.protocol.messages.memory_files import BYTES_PER_WORKER

TRAINING = Path(__file__).with_name("storm_training.py")
GONE_WITHIN_S = 10.0
OVER_WITHIN_S = 120.0
"""A training that has not got over a fault by then never will."""

_RUN_VARIABLE = "MOREH_STORM_RUN"
_WORKER = re.compile(r"moreh-worker-(\d+)")
_TOOK_OVER = re.compile(r"Others took over: (\d+) steps? (?:was|were) computed again, ([\d.]+) s")
_POLL_S = 0.01
_COPY_POLL_S = 2e-4  # a fraction of what a copy takes: looking all the time would take a core from the training
_FOUND_WITHIN_S = 60.0  # the moment that a fault is meant for


class Line(NamedTuple):
    """A number that the training has printed."""

    at_s: float
    name: str
    bits: str


class Survived(NamedTuple):
    """How the training got over a fault.

    Attributes:
        steps: Computed again.
        seconds: From the first signal to the next number.
    """

    steps: int
    seconds: float


class Failed(Exception):
    """The training did not get over a fault; the text says what became of it."""


class Training:
    """`storm_training.py`, running.

    Args:
        folder: For what it saves, prints and leaves.
        arguments: What follows its folder.
        recovery: Its MOREH_RECOVERY.
        variables: More of its environment.
        found_below: Processes of which the workers are descendants; None: they have the training's environment.

    Attributes:
        lines: The numbers that it has printed.
        says: What else it has printed, with the time.
    """

    def __init__(
        self,
        plan: str,
        folder: Path,
        arguments: Sequence[str],
        recovery: str,
        variables: Mapping[str, str] | None = None,
        found_below: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self._found_below = found_below
        self.lines: list[Line] = []
        self.says: list[tuple[float, str]] = []
        self._id, self._folder, self._temporary = uuid.uuid4().hex, folder, folder / "t"
        self._shared = _shared_files()
        self._temporary.mkdir(parents=True)
        environment = {
            **{name: value for name, value in os.environ.items() if name != "MOREH_RECOVERY"},
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "MOREH_RECOVERY": recovery,
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "TMPDIR": str(self._temporary),
            _RUN_VARIABLE: self._id,
            **(variables or {}),
        }
        self._errors = open(folder / "errors", "w")  # noqa: SIM115, closed in `end`
        command = [sys.executable, str(TRAINING), plan, str(folder), *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None, "asked for"
        with open(self._folder / "output", "w", buffering=1) as copy:
            for text in self.process.stdout:
                copy.write(text)
                fields = text.split()
                with self._arrived:
                    if len(fields) == 4 and fields[0].isdecimal():
                        self.lines.append(Line(float(fields[1]), fields[2], fields[3]))
                    else:
                        self.says.append((time.monotonic(), text.strip()))
                    self._arrived.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Waits until what was printed fulfils a condition.

        Raises:
            Failed: It has ended before, or it takes too long.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._arrived:
            while not condition():
                if not self._reader.is_alive():
                    raise Failed(f"exit code {self.process.wait()}: {self.last_words()}")
                if time.monotonic() > deadline_s:
                    self.process.send_signal(signal.SIGABRT)  # Python's stacks are its last words
                    raise Failed(f"nothing for {timeout_s:.0f} s: {self.last_words()}")
                self._arrived.wait(0.2)

    def last_words(self) -> str:
        """Returns the last line of its errors."""
        return (Path(self._folder / "errors").read_text().strip() or "no error").splitlines()[-1]

    def said(self, text: str) -> int:
        """Returns how many lines have a text."""
        return sum(text in line for _, line in self.says)

    def takeovers(self, since_s: float) -> list[int]:
        """Returns how many steps were computed again each time that others took over."""
        found = (_TOOK_OVER.search(line) for at_s, line in self.says if at_s >= since_s)
        return [int(one[1]) for one in found if one is not None]

    def workers(self) -> dict[int, int]:
        """Returns the process ids of its workers, by rank."""
        found = {}
        for pid in self._processes() if self._found_below is None else _below(self._found_below()):
            with contextlib.suppress(psutil.NoSuchProcess):
                one = psutil.Process(pid)
                name = _WORKER.fullmatch(one.name())
                if name and one.status() != psutil.STATUS_ZOMBIE:
                    found[int(name[1])] = pid
        return found

    def end(self) -> list[str]:
        """Waits for its end, ends what is left, and returns what it has left behind."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(OVER_WITHIN_S)
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while (left := self._processes()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        found = [f"process {pid}" for pid in left]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        self._errors.close()
        # PyTorch makes a folder that is to stay.
        files = [path for path in self._temporary.iterdir() if not path.name.startswith("torchinductor_")]
        found += [f"{path.name} for temporary files" for path in files if self.process.returncode == 0]
        found += [f"/dev/shm/{name}" for name in _shared_files() - self._shared]
        saved = self._folder / "saved"
        described = "".join(path.read_text() for path in saved.glob("checkpoint*.json"))
        found += [path.name for path in saved.glob("*.safetensors*") if path.name not in described]
        return found

    def _processes(self) -> list[int]:
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdecimal() and f"{_RUN_VARIABLE}={self._id}".encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found


def _below(pids: Sequence[int]) -> list[int]:
    """Returns the ids of all that processes have started, and what these have."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return found


def _shared_files() -> set[str]:
    """Returns the files in shared memory whose makers have ended, or that are this package's."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    made = {name: re.match(r"torch_(\d+)_", name) for name in names}
    return {name for name, by in made.items() if "moreh" in name or (by and not os.path.exists(f"/proc/{by[1]}"))}


# -- faults --------------------------------------------------------------------------------------------------------


class Storm:
    """Has faults befall a training.

    Args:
        chance: Chooses workers and moments.
    """

    def __init__(self, training: Training, chance: random.Random) -> None:
        self._training, self._chance = training, chance
        self._last_s = 0.0  # of the last signal that has arrived

    def strike(self, kind: str) -> Survived:
        """Has a fault happen at a random moment, and waits until the training has got over it.

        Raises:
            Failed: It has not.
        """
        training = self._training
        began_s = self.send(kind)
        training.wait_for(lambda: bool(training.takeovers(self._last_s)), OVER_WITHIN_S)
        count = len(training.lines)
        training.wait_for(lambda: len(training.lines) > count, OVER_WITHIN_S)
        return Survived(sum(training.takeovers(began_s)), time.monotonic() - began_s)

    def send(self, kind: str) -> float:
        """Has a fault happen at a random moment, and returns when it began."""
        return getattr(self, f"_{kind}")()  # type: ignore[no-any-return]

    def _rest(self, most_s: float) -> None:
        time.sleep(self._chance.uniform(0.0, most_s))

    def _signal(self, number: signal.Signals, count: int = 1) -> float:
        """Sends a signal to some workers, once there are any."""
        deadline_s = time.monotonic() + _FOUND_WITHIN_S
        while not (found := self._training.workers()):
            if time.monotonic() > deadline_s:
                raise Failed(f"there are no workers: {self._training.last_words()}")
            time.sleep(_POLL_S)
        began_s = time.monotonic()
        for rank in self._chance.sample(sorted(found), min(count, len(found))):
            self._send(found[rank], number)
        return began_s

    def _send(self, process: int, number: signal.Signals) -> None:
        sent_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):  # it has just ended with another one
            os.kill(process, number)
            self._last_s = sent_s

    def _in_phase(self, name: str, most_s: float) -> float:
        """Kills a worker soon after the training has said what it does next."""
        training = self._training
        count = training.said(f"> {name}")
        training.wait_for(lambda: training.said(f"> {name}") > count, OVER_WITHIN_S)
        self._rest(most_s)
        return self._signal(signal.SIGKILL)

    def _anywhere(self) -> float:
        self._rest(1.5)
        return self._signal(signal.SIGKILL)

    def _two(self) -> float:
        self._rest(1.5)
        return self._signal(signal.SIGKILL, 2)

    def _again(self) -> float:
        """Kills a worker, and one of those that take over as soon as there is one, or a little later."""
        self._rest(1.5)
        before = set(self._training.workers().values())
        began_s = self._signal(signal.SIGKILL)
        deadline_s = time.monotonic() + _FOUND_WITHIN_S
        while not set(self._training.workers().values()) - before and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        self._rest(1.5)
        self._signal(signal.SIGKILL)
        return began_s

    def _supervisor(self) -> float:
        self._rest(1.5)
        began_s = time.monotonic()
        for child in psutil.Process(self._training.process.pid).children():
            if "moreh_ap.runtime.host.agent" in child.cmdline():
                self._send(child.pid, signal.SIGKILL)
        return began_s

    def _stopped(self) -> float:
        self._rest(1.5)
        return self._signal(signal.SIGSTOP)

    def _crash(self) -> float:
        self._rest(1.5)
        return self._signal(signal.SIGSEGV)

    def _building(self) -> float:
        return self._in_phase("building", 0.8)

    def _saving(self) -> float:
        return self._in_phase("saving", 0.1)

    def _loading(self) -> float:
        return self._in_phase("loading", 0.5)

    def _generating(self) -> float:
        return self._in_phase("generating", 0.3)

    def _copying(self) -> float:
        """Kills a worker while it writes its copy: the first bytes of it are zero then."""
        deadline_s = time.monotonic() + _FOUND_WITHIN_S
        while not (slots := _slots(self._training.process.pid)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        workers = self._training.workers()
        places = [(slot, rank) for slot in slots for rank in workers]
        before = dict.fromkeys(places, bytes(8))
        try:
            while time.monotonic() < deadline_s:
                for slot, rank in places:
                    now = os.pread(slot, 8, rank * BYTES_PER_WORKER)
                    if now == bytes(8) != before[slot, rank]:
                        self._send(workers[rank], signal.SIGKILL)
                        return self._last_s
                    before[slot, rank] = now
                time.sleep(_COPY_POLL_S)
        finally:
            for slot in slots:
                os.close(slot)
        raise Failed(f"no copy was written in {_FOUND_WITHIN_S:.0f} s: {self._training.last_words()}")


KINDS = {
    "anywhere": "SIGKILL",
    "two": "SIGKILL of two workers at once",
    "again": "SIGKILL, and once more while others take over",
    "stopped": "SIGSTOP",
    "supervisor": "SIGKILL of the process that supervises the workers, which end with it",
    "crash": "SIGSEGV",
    "building": "SIGKILL while a model is laid out",
    "saving": "SIGKILL while a checkpoint is written",
    "loading": "SIGKILL while a checkpoint is read",
    "generating": "SIGKILL while text is generated",
    "copying": "SIGKILL while a copy of what workers hold is written",
}
"""What can happen; each at a random moment."""


def _slots(process: int) -> list[int]:
    """Returns descriptors of the memory in which workers of a training keep copies."""
    found = []
    for path in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(path).startswith("/memfd:moreh-snapshot-"):
                found.append(os.open(path, os.O_RDONLY))
    return found
