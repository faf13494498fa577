"""The warm parent: one process a machine that imports what workers need, and forks each of them.

Decides when it is safe to fork, what a forked worker has of its own, and whose death ends whom. Must not know the
engine, which starts threads when it is imported, nor commands.

[Note: warm parent]
The agent forks this process before it imports the engine; that of another host starts it (`warm_program`). It imports
PyTorch and what else workers import early, once for all of them, and listens at a socket in the folder that only this
user can enter. The engine starts a program for each worker, the client (`warm_client`), and waits for its end; the
client asks here for the worker, and ends as the worker ends. The kernel ends the workers with this process, and a
worker is killed when its client is gone. Where this process has ended or never was, the client becomes the worker and
imports for itself.

While this process imports, the kernel ends it with the agent. Once it can fork it outlives the agent, so that PyTorch
is not imported once more when the agent is killed: clients end with their agent, those of another agent ask here for
other workers, and these inherit from this process what the first ones did. It then ends with the controller, to which
it has told its process id, or when the controller kills it. (On another host the agent is its controller.)

A process may be forked as long as it has one thread and no device. So a module of another library is imported in a
forked copy: if the copy is fit to be forked it goes on in place of this process, which waits for it; if it is not, it
ends, and each worker imports that module itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from moreh_ap.runtime.child_process import end_with, outlive_parent
from moreh_ap.runtime.forking.descendants import end_descendants

_UNFIT = 3  # exit code of a process that must not be forked
_OWN = "moreh_ap."  # a package whose modules start no threads, as `torch` itself
_BACKLOG = 1024  # clients that may wait while this process imports
_REQUEST_TIMEOUT_S = 10.0  # a client sends at once
# While modules are imported. PyTorch counts devices without initializing CUDA, which a forked process could not use.
_WHILE_IMPORTING = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class _Client:
    """A client and the worker that it stands for.

    Args:
        connection: To the client. It says nothing after its request, so what arrives is its end.
        worker: Process id.
    """

    def __init__(self, connection: socket.socket, worker: int) -> None:
        self._connection, self._worker = connection, worker
        self._watched = os.pidfd_open(worker)
        with suppress(OSError):  # the client has ended
            connection.sendall(f"{worker}\n".encode())

    def descriptors(self) -> list[int]:
        """Returns what becomes readable at the end of the worker, or of the client."""
        return [self._watched, *([] if self._connection.fileno() < 0 else [self._connection.fileno()])]

    def has_ended(self, readable: set[int]) -> bool:
        """Tells the client how its worker ended, or kills the worker of a client that has ended.

        Returns:
            Whether the worker has ended.
        """
        if self._watched in readable:
            status = os.waitpid(self._worker, 0)[1]
            with suppress(OSError):  # the client has ended, too
                self._connection.sendall(f"{status}\n".encode())
            self.close()
            return True
        if self._connection.fileno() in readable:
            with suppress(ProcessLookupError):
                os.killpg(self._worker, signal.SIGKILL)
            self._connection.close()
        return False

    def close(self) -> None:
        """Closes what this process has open for the client."""
        self._connection.close()
        os.close(self._watched)


def fork(path: str, imports: Sequence[str], controller_fd: int, controller: int) -> list[str] | None:
    """Starts the warm parent, where this process can be forked.

    Args:
        path: Where it is to listen.
        imports: Modules to import, in this order.
        controller_fd: Descriptor of a socket, which goes to the warm parent: names of further modules arrive there,
            a line each, until it says that it is ready, by its process id.
        controller: Process id of who has the other end. The warm parent ends with it.

    Returns:
        None in the calling process; in a worker, what its bootstrap module is given.
    """
    if _can_serve():
        listener = _listener(path)
        agent = os.getpid()
        if os.fork() == 0:
            end_with(agent)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)
            os.close(nothing)
            return _WarmParent(listener, socket.socket(fileno=controller_fd), controller).run(imports)
        listener.close()
    os.close(controller_fd)
    return None


def serve(path: str, imports: Sequence[str], controller_fd: int, controller: int) -> list[str] | None:
    """Makes this process the warm parent; see `fork` for the arguments.

    Returns:
        In a worker, what its bootstrap module is given; None where this process cannot be forked.
    """
    if not _can_serve():
        return None
    return _WarmParent(_listener(path), socket.socket(fileno=controller_fd), controller).run(imports)


def _listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(_BACKLOG)
    return listener


class _WarmParent:
    def __init__(self, listener: socket.socket, connection: socket.socket, controller: int) -> None:
        self._listener, self._connection, self._controller = listener, connection, controller
        self._added: dict[str, str] = {}  # variables that modules set while they are imported
        self._left_out: list[str] = []

    def run(self, imports: Sequence[str]) -> list[str]:
        """Imports and serves; returns in workers only, what the bootstrap module of each is given."""
        gc.disable()  # what is imported stays
        os.environ.update(_WHILE_IMPORTING)
        before = dict(os.environ)
        while imports:
            for name in imports:
                if name == "torch" or name.startswith(_OWN):
                    _import(name)
                elif not self._imported_in_a_copy(name):
                    self._left_out.append(name)
            imports = self._further_imports()
        if not _is_fit():
            os._exit(_UNFIT)
        self._added = {name: value for name, value in os.environ.items() if before.get(name) != value}
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()
        with suppress(OSError):  # the controller has ended
            self._connection.sendall(f"{os.getpid()}\n".encode())
        self._connection.close()
        return self._serve()

    def _further_imports(self) -> list[str]:
        """Returns the modules of which the controller has told meanwhile."""
        self._connection.setblocking(False)
        told = b""
        with suppress(BlockingIOError, ConnectionResetError):
            while part := self._connection.recv(4096):
                told += part
        self._connection.setblocking(True)
        return told.decode().split()

    def _imported_in_a_copy(self, name: str) -> bool:
        """Returns whether a module has been imported: in a copy of this process that goes on in its place."""
        original = os.getpid()
        copy = os.fork()
        if copy == 0:
            end_with(original)
            _import(name)
            if _is_fit():
                return True
            os._exit(_UNFIT)
        if os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == _UNFIT:
            return False
        os._exit(0)  # the copy has served

    def _serve(self) -> list[str]:
        clients: list[_Client] = []
        own = [self._listener.fileno(), self._watched_controller()]
        while True:
            readable = _wait([*own, *(each for client in clients for each in client.descriptors())])
            if own[1] in readable:
                end_descendants()
                os._exit(0)
            clients = [client for client in clients if not client.has_ended(readable)]
            if self._listener.fileno() not in readable:
                continue
            connection, _ = self._listener.accept()
            request = _request(connection)
            if request is None:
                connection.close()
                continue
            worker = _forked_worker()
            if worker == 0:
                self._listener.close()
                connection.close()
                os.close(own[1])
                for client in clients:
                    client.close()
                self._become_worker(request["environment"])
                return list(request["arguments"])
            clients.append(_Client(connection, worker))

    def _watched_controller(self) -> int:
        """Returns a descriptor of the controller, with which this process ends from now on instead of its parent."""
        try:
            controller = os.pidfd_open(self._controller)
        except ProcessLookupError:
            os._exit(0)
        outlive_parent()
        return controller

    def _become_worker(self, environment: dict[str, str]) -> None:
        """Gives a worker what it would have if it had been started anew.

        Args:
            environment: That of its client.
        """
        environment = {**environment, **self._added}
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        gc.enable()
        if "numpy" in sys.modules:  # Python gives its own generator another seed at a fork
            sys.modules["numpy"].random.seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()
        for name in self._left_out:
            logging.getLogger(__name__).debug("%s starts threads: each worker imports it itself", name)


def _forked_worker() -> int:
    """Forks; returns 0 in the worker, which leads a process group and ends with this process."""
    original = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)
        end_with(original)
    else:
        with suppress(ProcessLookupError):  # it has ended
            os.setpgid(worker, worker)
    return worker


def _wait(descriptors: Sequence[int]) -> set[int]:
    """Waits; returns those that are readable, or whose other end is closed."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll()}


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except (Exception, SystemExit):  # only an attempt to be early: the command that needs the module reports its error
        logging.getLogger(__name__).debug("early import of %s failed", name, exc_info=True)


def _is_fit() -> bool:
    """Returns whether this process may be forked: it has one thread and no device.

    Some libraries (OpenBLAS) end their threads at a fork and start them when they are needed. So a fork comes first; in
    the forked process PyTorch knows whether it could use a device.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns if there are threads
        trial = os.fork()
    if trial == 0:
        os._exit(_UNFIT if "torch" in sys.modules and sys.modules["torch"].cuda._is_in_bad_fork() else 0)
    return os.waitpid(trial, 0)[1] == 0 and _num_threads() == 1


def _can_serve() -> bool:
    """Returns whether the system has what a warm parent needs, and this process may be forked."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # Linux before 5.3
        return False
    return _num_threads() == 1


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _request(connection: socket.socket) -> dict[str, Any] | None:
    """Returns what a client asks for, None if it ends before it has said so."""
    connection.settimeout(_REQUEST_TIMEOUT_S)
    try:
        with connection.makefile("rb") as stream:
            size = int.from_bytes(stream.read(4), "big")
            text = stream.read(size)
    except OSError:
        return None
    if size == 0 or len(text) < size:
        return None
    connection.settimeout(None)
    return json.loads(text)  # type: ignore[no-any-return]
