"""The program that supervises the worker processes of one machine: `python -m moreh_ap.runtime.host.agent`.

Decides where the engine listens on this machine, and that nothing is left once the controller is gone. Must not know
commands, nor PyTorch: the engine starts the workers in this process and relays their messages.

[Note: strangers]
Whoever reaches a socket of the engine and knows the name of what listens there can start programs as this user. The
sockets are files in a folder that only this user can enter. The engine opens another one beside them, in the abstract
namespace of Linux, which every user of the machine can reach; here the name behind it is a random one, and in the
controller, where the engine has a fixed name, `engine` closes that socket.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from moreh_ap.runtime import bootstrap
from moreh_ap.runtime.forking import warm_parent
from moreh_ap.runtime.forking.descendants import end_descendants
from moreh_ap.runtime.worker_environment import IGNORES_SIGTERM_VARIABLE

END = b"end\n"
CONTROLLER_POLL_S = 1.0  # how often an agent looks whether its controller lives; usually its input ends at once


@dataclass(frozen=True)
class AgentTask:
    """What an agent reads from its standard input, as one line.

    Attributes:
        controller: Process id of the controller.
        folder: Folder of the controller's run, for sockets; ends with the controller.
        name: A folder below it for this agent's sockets.
        warm_socket: Where the warm parent that this agent forks is to listen; empty: there is one already.
        imports: Modules that it imports.
        warm_parent_fd: Inherited descriptor of a socket between controller and warm parent.
    """

    controller: int
    folder: str
    name: str
    warm_socket: str
    imports: tuple[str, ...]
    warm_parent_fd: int

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> AgentTask:
        """Returns the task that `str` printed."""
        values = json.loads(text)
        return cls(**{**values, "imports": tuple(values["imports"])})


def main() -> None:
    """Serves the engine until the controller writes `END`, or is gone; in a worker, does what the engine says."""
    with open(0, "rb", buffering=0, closefd=False) as given:  # nothing of what follows the line is taken from the pipe
        task = AgentTask.parse(given.readline().decode())
    if os.environ.get(IGNORES_SIGTERM_VARIABLE) == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # processes that it starts inherit this
    own = Path(task.folder, task.name)
    own.mkdir(mode=0o700)
    if task.warm_socket:
        arguments = warm_parent.fork(task.warm_socket, task.imports, task.warm_parent_fd, task.controller)
        if arguments is not None:
            bootstrap.main(arguments)
            return
    os.environ["TMPDIR"] = str(own)  # the engine makes folders for sockets of its own there
    threading.Thread(target=_end_with_controller, args=(task,), name="moreh-controller", daemon=True).start()
    serve(f"ipc://{own}/host", lambda address: os.write(1, f"{address}\n".encode()))


def serve(url: str, on_address: Callable[[str], object]) -> None:
    """Serves the engine for the rest of this process's life.

    Args:
        url: Where to listen.
        on_address: Told where the engine listens, with the random name that a controller needs to know, once it does.
    """
    from monarch.actor import start_worker_loop_forever
    from monarch.job import new_service_proc_id, service_proc_addr

    address = service_proc_addr(url, new_service_proc_id())
    serving = start_worker_loop_forever(address=address, ca="trust_all_connections")
    on_address(address)
    serving.get()


def _end_with_controller(task: AgentTask) -> None:
    """Waits for `END`, or the end of the controller, then ends the workers, all that they started, and this process.

    Forked children of a controller that was killed may hold the pipe open, and its folder is left to remove.
    """
    told = b""
    while os.getppid() == task.controller:
        ready, _, _ = select.select([0], [], [], CONTROLLER_POLL_S)
        if ready:
            told = os.read(0, 4096)
            break
    end_descendants()
    shutil.rmtree(Path(task.folder, task.name) if told == END else task.folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)  # the engine's threads would go on after `sys.exit`


if __name__ == "__main__":
    main()
