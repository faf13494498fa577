"""The warm parent of another host, as a program of its own: `python -m moreh_ap.runtime.forking.warm_program`.

The agent of another host has threads when it hears which workers it is to have, so it cannot fork the warm parent as
the agent of one machine does (`warm_parent`): it starts this program, with all that workers inherit. Decides how the
two speak. Must not know what workers do, nor what reaches the agent.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from moreh_ap.runtime import bootstrap
from moreh_ap.runtime.child_process import end_with
from moreh_ap.runtime.forking import warm_parent


class WarmProgram:
    """The program, as the agent sees it. Made by the thread that lives as long as the agent: the program ends with it.

    Args:
        folder: A folder that only this user can enter, for the socket at which it serves.
        imports: Modules that the workers need.
        environment: Variables of the program.
        inherited: Descriptors for the workers.
        on_ready: Called, in a thread, once workers can be forked, or there will be no warm parent.
    """

    def __init__(
        self,
        folder: Path,
        imports: Sequence[str],
        environment: Mapping[str, str],
        inherited: Sequence[int],
        on_ready: Callable[[], object],
    ) -> None:
        self.path = str(folder / "warm")
        self._ours, theirs = socket.socketpair()
        task = json.dumps([os.getpid(), self.path, list(imports), theirs.fileno()])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moreh_ap.runtime.forking.warm_program", task],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[*inherited, theirs.fileno()],
        )
        theirs.close()
        threading.Thread(target=self._await, args=(on_ready,), name="moreh-warm", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id; copies of it that go on in its place are its descendants."""
        return self._process.pid

    def tell(self, module: str) -> None:
        """Names one more module that workers need, as long as the program imports."""
        with suppress(OSError):  # it is ready, or has ended: each worker imports the module itself
            self._ours.sendall(f"{module}\n".encode())

    def _await(self, on_ready: Callable[[], object]) -> None:
        with suppress(OSError):
            self._ours.recv(32)  # what it says once it is ready; nothing if it has ended
        on_ready()
        self._process.wait()


def main(task: str) -> None:
    """Serves as long as the agent lives; in a forked worker, does what the engine says."""
    agent, path, imports, controller_fd = json.loads(task)
    end_with(agent)
    arguments = warm_parent.serve(path, imports, controller_fd, agent)
    if arguments is not None:
        bootstrap.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1])
