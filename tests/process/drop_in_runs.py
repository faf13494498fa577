"""Runs scripts with and without the one line, and compares what they print; must not know what a script does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from user_script import SCRIPTS, UserScript

SPLIT = {"MOREH_STRICT": "1"}  # a training call that every device computes whole is an error
WHOLE = {
    "drop_in_objects.py": "a graph as one sparse matrix",
}
"""Scripts with training calls that every device computes whole, and why. The table may only shrink."""
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def both(script: str, folder: Path) -> tuple[list[str], list[str]]:
    """What `script` prints for its user with the one line on two devices, and on one CPU without it."""
    with (
        UserScript(script, "--ap", cwd=folder, MOREH_NUM_DEVICES="2", **SPLIT) as ours,
        UserScript(script, cwd=folder) as reference,
    ):
        return _for_the_user(ours.succeed()), _for_the_user(reference.succeed())


class BothInTurn:
    """As `both`, for scripts that share their processes: libraries are imported, and workers started, once.

    Args:
        folder: Takes what the processes write.
        plan: What scripts take that ask for no plan, so that none depends on what was measured of the machine. None:
            small models run in the script's own process, and the others under the plan that is predicted to be best.
    """

    def __init__(self, folder: Path, plan: str | None = "replicate=2") -> None:
        self._folder, self._plan = folder, plan
        self._processes: dict[bool, tuple[InTurn, ...]] = {}  # by whether training calls have to be split

    def __call__(self, script: str, folder: Path) -> tuple[list[str], list[str]]:
        ours, reference = self._run(folder, [script, "--ap"], [script])
        return ours, reference

    def ours(self, script: str, folder: Path, *arguments: str) -> list[str]:
        """Returns what `script` prints with the one line alone."""
        (ours,) = self._run(folder, [script, "--ap", *arguments])
        return ours

    def _run(self, folder: Path, *commands: list[str]) -> list[list[str]]:
        is_split = self._plan is not None and commands[0][0] not in WHOLE
        if is_split not in self._processes:
            plan = () if self._plan is None else (self._plan,)
            ours = InTurn(self._folder, *plan, **(SPLIT if is_split else {}))
            self._processes[is_split] = ours, InTurn(self._folder)
        processes = self._processes[is_split]
        try:
            for process, command in zip(processes, commands):
                process.start(folder, *command)
            return [_for_the_user(process.output()) for process, _ in zip(processes, commands)]
        except BaseException:  # what is left of a script that failed must not reach the next
            for process in self._processes.pop(is_split):
                process.kill()
            raise

    def close(self) -> None:
        """Fails if a process does not end well."""
        for process in [one for pair in self._processes.values() for one in pair]:
            process.close()


class InTurn:
    """A process that runs one script after the other; arguments as `UserScript`'s, for `in_turn.py`."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        self._script = UserScript("in_turn.py", *arguments, cwd=folder, text=None, MOREH_NUM_DEVICES="2", **variables)
        self._num_started = self._begin = self._begin_err = 0

    def start(self, folder: Path, script: str, *arguments: str) -> None:
        """Lets the process run `script` in `folder`."""
        self._begin, self._begin_err = len(self._script.out), len(self._script.err)
        self._num_started += 1
        stdin = self._script.process.stdin
        stdin.write(json.dumps([str(folder), str(SCRIPTS / script), *arguments]) + "\n")
        stdin.flush()

    def output(self) -> str:
        """Returns what the script has printed, once it has ended well."""
        end = f"\nend of script {self._num_started}: "
        self._script.wait_for_output(end)
        out, _, how = self._script.out[self._begin :].partition(end)
        assert how.startswith("well"), f"{out}\n{self._script.err[self._begin_err :]}"
        return out

    def close(self) -> None:
        """Ends the process; fails if it does not end well."""
        with self._script as script:
            script.process.stdin.close()
            script.succeed()

    def kill(self) -> None:
        """Ends the process at once."""
        with self._script:
            pass


def _for_the_user(out: str) -> list[str]:
    """Lines without those of Trainer, which hold times, and those of the one line's log."""
    return [line for line in out.splitlines() if line and line[0] not in "[{"]


def assert_same(ours: list[str], reference: list[str]) -> None:
    """Fails where words differ, or numbers by more than 1e-4 of their size (1e-5 where they are near zero)."""
    assert [NUMBER.sub("#", line) for line in ours] == [NUMBER.sub("#", line) for line in reference]
    for line, expected in zip(ours, reference):
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in (line, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1.1e-5), f"{line}\n{expected}"


def num_losses(lines: list[str]) -> int:
    """How many losses are printed in `lines`."""
    return sum(len(re.findall(r"loss \d", line)) for line in lines)
