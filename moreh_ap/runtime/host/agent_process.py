"""The agent of this machine, as the controller sees it.

Decides how an agent is started and ended. Must not know the engine.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence

from moreh_ap.errors import MeshStartError
from moreh_ap.runtime import engine_variables
from moreh_ap.runtime.forking.warm_parent_process import WarmParentProcess
from moreh_ap.runtime.host.agent import END, AgentTask
from moreh_ap.runtime.host.private_sockets import run_folder

_END_TIMEOUT_S = 5.0


class AgentProcess:
    """A running agent.

    Args:
        inherited: File descriptors for the workers, which have them from the warm parent.
        imports: Modules that all workers need; one of a library that the script has not imported, when it does.
        environment: Variables of all workers.
        warm_parent: What forks them, started by an agent that has ended; None: this agent starts one.

    Attributes:
        folder: Its own folder for files of the workers; it makes it, and it removes it when it ends.
    """

    def __init__(
        self,
        inherited: Sequence[int],
        imports: Sequence[str],
        environment: Mapping[str, str],
        warm_parent: WarmParentProcess | None = None,
    ) -> None:
        self._imports, self._environment = imports, environment
        self._warm_parent = warm_parent or WarmParentProcess(imports)
        folder, name = run_folder(), uuid.uuid4().hex[:8]
        self.folder = folder / name
        self._address = ""
        self._errors = open(folder / f"{name}.log", "w+")  # noqa: SIM115, closed with the agent
        task = AgentTask(os.getpid(), str(folder), name, *self._warm_parent.to_start())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moreh_ap.runtime.host.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=[*inherited, *([task.warm_parent_fd] if task.warm_socket else [])],
            start_new_session=True,  # Ctrl-C is for the script
            env={**os.environ, **engine_variables.of_worker(), **environment},
        )
        assert self._process.stdin is not None, "asked for"
        with contextlib.suppress(BrokenPipeError):  # it has ended: `address` says so
            self._process.stdin.write(f"{task}\n".encode())
            self._process.stdin.flush()
        self._warm_parent.started()

    def address(self, timeout_s: float) -> str:
        """Returns where the engine of the agent listens, once it does.

        Raises:
            MeshStartError: The agent has ended, or is not ready in time.
        """
        assert self._process.stdout is not None, "asked for"
        if self._address:
            return self._address
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline().decode().strip() if ready else ""
        if line:
            self._address = line
            return line
        self._errors.seek(0)
        last = "\n".join(self._errors.read().splitlines()[-5:])
        how = f"ended with exit code {self._process.wait()}" if ready else f"was not ready after {timeout_s:g} s"
        raise MeshStartError(
            f"The process that supervises the workers {how}. Its last output:\n{last}",
            fix="python -c 'import monarch.actor'  # does the installation work?",
        )

    @property
    def warm(self) -> Sequence[str]:
        """What a client is told: where the warm parent listens, if there is one, and the process id of this agent."""
        return self._warm_parent.path, str(self.pid)

    def await_imports(self, is_stopping: Callable[[], bool]) -> None:
        """Waits until the warm parent has imported what workers need, or has ended; the engine waits 30 s at most."""
        self._warm_parent.await_imports(is_stopping)

    def can_go_on(self) -> bool:
        """Returns whether this agent, or another one in its place, can start workers as quickly as before."""
        return self._warm_parent.can_fork() or (self.exit_code() is None and not self._warm_parent.was_lost())

    def going_on(self) -> AgentProcess:
        """Returns this agent; if it has ended, another one in its place, whose workers the same warm parent forks."""
        if self.exit_code() is None:
            return self
        self._end()
        return AgentProcess((), self._imports, self._environment, self._warm_parent)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Returns how it ended, None while it lives."""
        return self._process.poll()

    def end(self) -> None:
        """Ends the agent, and with it all workers."""
        self._end()
        self._warm_parent.end()

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None, "asked for"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(END)
            self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
