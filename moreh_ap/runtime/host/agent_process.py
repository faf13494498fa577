"""The agent of this machine, as the controller sees it.

Decides how an agent is started and ended. Must not know the engine.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence

from moreh_ap.errors import MeshStartError
from moreh_ap.runtime import engine_variables
from moreh_ap.runtime.forking.early_imports import EarlyImports
from moreh_ap.runtime.forking.warm_parent import socket_path
from moreh_ap.runtime.host.agent import END, AgentTask
from moreh_ap.runtime.host.private_sockets import run_folder

_END_TIMEOUT_S = 5.0
_POLL_S = 0.1


class AgentProcess:
    """A running agent.

    Args:
        inherited: File descriptors for the workers.
        imports: Modules that all workers need; one of a library that the script has not imported, when it does.
        environment: Variables of all workers.

    Attributes:
        folder: Its own folder for files of the workers; it makes it, and it removes it when it ends.
    """

    def __init__(self, inherited: Sequence[int], imports: Sequence[str], environment: Mapping[str, str]) -> None:
        folder, name = run_folder(), uuid.uuid4().hex[:8]
        self.folder = folder / name
        self._address = ""
        self._errors = open(folder / f"{name}.log", "w+")  # noqa: SIM115, closed with the agent
        self._warm_parent, theirs = socket.socketpair()
        self._imports = EarlyImports(imports, self._tell_warm_parent)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moreh_ap.runtime.host.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=[*inherited, theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the script
            env={**os.environ, **engine_variables.of_worker(), **environment},
        )
        assert self._process.stdin is not None, "asked for"
        with contextlib.suppress(BrokenPipeError):  # it has ended: `address` says so
            task = AgentTask(os.getpid(), str(folder), name, self._imports.now, theirs.fileno())
            self._process.stdin.write(f"{task}\n".encode())
            self._process.stdin.flush()
        theirs.close()
        self._imports.begin()

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
    def warm_socket(self) -> str:
        """Where its warm parent listens, if it has one."""
        return socket_path(self.folder)

    def await_imports(self, is_stopping: Callable[[], bool]) -> None:
        """Waits until the warm parent has imported what workers need, or has ended; the engine waits 30 s at most."""
        while not select.select([self._warm_parent], [], [], _POLL_S)[0]:
            if is_stopping():
                return
        self._imports.stop()

    def _tell_warm_parent(self, module: str) -> None:
        with contextlib.suppress(OSError):  # it has ended, or is ready: each worker imports the module itself
            self._warm_parent.sendall(f"{module}\n".encode())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Returns how it ended, None while it lives."""
        return self._process.poll()

    def end(self) -> None:
        """Ends the agent, and with it all workers."""
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
        self._imports.stop()
        self._warm_parent.close()
        self._errors.close()
