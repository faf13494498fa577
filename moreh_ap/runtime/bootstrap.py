"""The first code that runs in a worker process: `python -m moreh_ap.runtime.bootstrap LAUNCH -m ENGINE_MODULE`.

Decides what happens before the engine takes over: where output goes, and that the slow imports begin at once, beside
the engine's own start. Must not know the engine: its module comes in on the command line.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import logging
import os
import runpy
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from moreh_ap.runtime.hangs import stack_dumps


@dataclass(frozen=True)
class Launch:
    """The values that a worker gets on its command line.

    Attributes:
        rank: which worker this is.
        pid_fd: file descriptor, inherited, to which it writes its rank and process id at once.
        stdout_fd: file descriptor, inherited, that takes its standard output.
        stderr_fd: the same for its standard error.
        other_fds: inherited descriptors of other workers, to be closed.
        imports: modules to import in the background, in this order.
    """

    rank: int
    pid_fd: int
    stdout_fd: int
    stderr_fd: int
    other_fds: tuple[int, ...]
    imports: tuple[str, ...]

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Launch:
        """Returns the launch that `str` printed."""
        values = json.loads(text)
        return cls(
            rank=values["rank"],
            pid_fd=values["pid_fd"],
            stdout_fd=values["stdout_fd"],
            stderr_fd=values["stderr_fd"],
            other_fds=tuple(values["other_fds"]),
            imports=tuple(values["imports"]),
        )


def _redirect_output(launch: Launch) -> None:
    os.dup2(launch.stdout_fd, 1)
    os.dup2(launch.stderr_fd, 2)
    for fd in {launch.stdout_fd, launch.stderr_fd, *launch.other_fds} - {1, 2}:
        os.close(fd)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # as on a terminal: whole lines, at once
    faulthandler.enable()  # a crash in native code leaves its Python stack on standard error
    stack_dumps.offer()


def _import_all(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # only an attempt to be early: the command that needs the module reports its error
            logging.getLogger(__name__).debug("early import of %s failed", name, exc_info=True)


def main(arguments: list[str]) -> None:
    """Sets the process up and becomes the engine's worker; returns when the engine ends it.

    Args:
        arguments: the launch as text, then ``-m`` and the engine's module with its arguments.
    """
    launch = Launch.parse(arguments[0])
    os.write(launch.pid_fd, f"{launch.rank} {os.getpid()}\n".encode())
    os.close(launch.pid_fd)
    _redirect_output(launch)
    if sys.platform == "linux":  # for `top` and `ps`: a forked process has the command line of its parent
        Path("/proc/self/comm").write_text(f"moreh-worker-{launch.rank}")
    threading.Thread(target=_import_all, args=(launch.imports,), name="moreh-imports", daemon=True).start()
    sys.argv = arguments[2:]
    runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
