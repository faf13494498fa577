"""The agent of another host: `python -m moreh_ap.runtime.host.remote_agent`.

Decides what a host does for a controller that reaches it by ssh or by hand: it says what it has, then serves the engine
as the agent of one machine does, and passes on what its workers print, how they end, and what they ask of the store.
Nothing is left once its input ends. Must not know commands, nor PyTorch.

Keys come over the input, and stay in memory of this process: no file, no variable and no command line has them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from moreh_ap.hosts import host_files, reachability, script_files
from moreh_ap.hosts.channel import Channel, ChannelError, Message
from moreh_ap.hosts.credentials import Credentials
from moreh_ap.hosts.host_report import interfaces, look
from moreh_ap.local.memory_limit import free_memory
from moreh_ap.runtime import engine_variables
from moreh_ap.runtime.forking.descendants import end_descendants
from moreh_ap.runtime.forking.warm_program import WarmProgram
from moreh_ap.runtime.hangs.host_sights import HostSights, tell_stacks
from moreh_ap.runtime.host import agent
from moreh_ap.runtime.host.agent_output import WorkerPipes
from moreh_ap.runtime.host.private_sockets import run_folder
from moreh_ap.runtime.host.serving import Serving
from moreh_ap.runtime.host.worker_usage import WorkerUsage
from moreh_ap.runtime.recovery.copy_memory import CopyMemory
from moreh_ap.runtime.relay.command_relay import CommandRelay
from moreh_ap.runtime.shared_memory import make_host_memory
from moreh_ap.runtime.store.store_relay import StoreRelay

ALIVE_S = 5.0
"""How often either side says that it lives."""

SILENCE_S = 120.0
"""After how long without a word a side counts as gone. A script may keep its threads from running for a while."""

ORPHAN_TIMEOUT = "60s"
"""After how long without the controller the engine ends its workers; it runs beside the script's threads."""

_END_S = 30.0  # how long workers may take to end: a device may have to finish first
_END_POLL_S = 0.02


class RemoteAgent:
    """This host, for the time of one run.

    Args:
        channel: The connection to the controller.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._folder = run_folder()
        self._files = host_files.HostFiles(self._folder)
        self._pipes: WorkerPipes | None = None
        self._store: StoreRelay | None = None
        self._commands: CommandRelay | None = None
        self._probe: reachability.Probe | None = None
        self._address = ""
        self._memory_fd, self._start = -1, 0
        self._workers: tuple[list[int], str] = [], ""  # ranks, and threads of each
        self._environment: dict[str, str] = {}  # of what forks workers
        self._copies: CopyMemory | None = None
        self._serves_at = ""  # where the engine listens
        self._shown: Mapping[str, str] = {}  # credentials
        self._warm: WarmProgram | None = None
        self._is_warm = False
        self._alive_s, self._sights = ALIVE_S, HostSights(ALIVE_S)
        self._heard_s = time.monotonic()

    def run(self) -> None:
        """Does what the controller asks until it ends; returns to serve the engine meanwhile."""
        self._channel.send("report", **look(os.environ).values())
        threading.Thread(target=self._look_after_controller, name="moreh-alive", daemon=True).start()
        while True:
            message = self._next()
            if message.kind == "serve":
                break
            self._handle(message)
        url = self._prepare(message.values)
        threading.Thread(target=self._follow, name="moreh-controller", daemon=True).start()
        agent.serve(url, self._say_serving)

    # -- messages --------------------------------------------------------------------------------------------------

    def _next(self) -> Message:
        """Returns the controller's next message; ends this process where there is none."""
        try:
            message = self._channel.receive()
        except ChannelError:
            message = None
        self._heard_s = time.monotonic()
        if message is None or message.kind == "end":
            self._end()
        assert message is not None, "the process has ended"
        return message

    def _follow(self) -> None:
        while True:
            self._handle(self._next())

    def _handle(self, message: Message) -> None:
        kind, values = message.kind, message.values
        if kind == "store" and self._store is not None:
            self._store.answer(message)
        elif kind == "again":
            self._begin_again(values)
        elif kind == "forget" and self._copies is not None:
            self._copies.close()
        elif kind == "room" and self._copies is not None:
            has_room, why = self._copies.make_room(values["num_bytes"])
            self._answer(kind, {"has_room": has_room, "why": why, "room_for_copies": self._copies.room()})
        elif kind == "stacks" and self._pipes is not None:
            threading.Thread(target=tell_stacks, args=(self._pipes.pids, self._tell), daemon=True).start()
        elif kind == "import" and self._warm is not None:
            self._warm.tell(values["module"])
        elif kind == "listen":
            self._answer(kind, self._listen(values["address"]))
        elif kind == "reach":
            self._answer(kind, {"failed": [reachability.reaches(*target) for target in values["targets"]]})
        elif kind == "measure":
            self._answer(kind, self._measure(values["address"], values["port"]))
        elif kind == "differing":
            self._answer(kind, {"files": script_files.different_on_this_host(values["folder"], values["digests"])})
        elif kind == "identities":
            self._answer(kind, {"identities": [list(script_files.identity_of(path)) for path in values["paths"]]})
        elif kind == "digest":
            threading.Thread(target=self._look_through, args=(values["path"],), daemon=True).start()
        elif kind == "file":
            self._take(message)
        elif kind == "piece":
            self._give(values["name"], values["start"])
        elif kind == "value" and self._commands is not None:
            self._give_value(self._commands, values["number"], values["start"], values["num_bytes"])
        elif kind == "remove":
            with contextlib.suppress(OSError, ValueError):  # the folder goes with this process anyway
                self._files.remove(values["name"])

    def _answer(self, kind: str, values: Mapping[str, Any]) -> None:
        self._tell(kind, **values)

    def _tell(self, kind: str, payload: bytes = b"", **values: Any) -> None:
        try:
            self._channel.send(kind, payload, **values)
        except (OSError, ValueError):  # the controller is gone
            self._end()

    def _listen(self, address: str) -> dict[str, Any]:
        """Opens a port at an address of this host, to which the others try to connect."""
        self._address = address
        interface = interfaces().get(address, "")
        if self._probe is not None:  # another host joins
            self._probe.close()
        try:
            self._probe = reachability.Probe(address)
        except OSError as error:
            return {"port": 0, "interface": interface, "files": "", "error": str(error)}
        files = str(self._files.folder)
        return {"port": self._probe.port, "interface": interface, "files": files, "error": ""}

    def _measure(self, address: str, port: int) -> dict[str, Any]:
        try:
            return {**asdict(reachability.measure(address, port)), "error": ""}
        except OSError as error:
            return {"error": str(error)}

    def _look_through(self, path: str) -> None:
        """Answers with a digest, beside the messages that arrive while a large file is read."""
        try:
            found = host_files.digest(path)
        except OSError:  # it cannot be read here: it is sent
            found = ""
        self._answer("digest", {"digest": found})

    def _take(self, message: Message) -> None:
        values, error = message.values, ""
        try:
            self._files.write(values["area"], values["name"], message.payload, is_first=values["is_first"])
        except (OSError, ValueError) as failure:
            error = str(failure)
        if error or values["is_last"]:
            self._answer("file", {"error": error})

    def _give(self, name: str, start: int) -> None:
        """Answers with a piece of what a worker has written: one at a time is in memory, here and there."""
        piece, error = b"", ""
        try:
            piece = self._files.read_piece(name, start)
        except (OSError, ValueError) as failure:
            error = str(failure)
        self._tell("piece", piece, error=error)

    def _give_value(self, commands: CommandRelay, number: int, start: int, num_bytes: int) -> None:
        piece, error = b"", ""
        try:
            piece = commands.read_value(number, start, num_bytes)
        except OSError as failure:
            error = str(failure)
        self._tell("value", piece, error=error)

    # -- serving ---------------------------------------------------------------------------------------------------

    def _prepare(self, values: Mapping[str, Any]) -> str:
        """Makes what the workers of this host need; returns where the engine is to listen."""
        if self._probe is not None:
            self._probe.close()
        with contextlib.suppress(OSError):  # it is not on this host
            os.chdir(values["working_folder"])
        self._memory_fd = make_host_memory()
        self._copies = CopyMemory(values["copies"]) if values["copies"] else None
        if self._copies is not None and values["room"]:
            self._copies.make_room(values["room"])  # where there is none, copies become too large
        os.environ.update(engine_variables.of_worker())
        self._environment = dict(os.environ)  # keys are not in it
        os.environ["HYPERACTOR_MESH_ORPHAN_TIMEOUT"] = ORPHAN_TIMEOUT
        os.environ["TMPDIR"] = str(self._folder)
        self._shown = Credentials(**values["credentials"]).as_files()
        self._let_workers_in(values)
        os.environ.update(self._shown)
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"tls://{host}:{reachability.free_port(self._address)}"

    def _let_workers_in(self, values: Mapping[str, Any]) -> None:
        """Makes what workers of a start need: sockets of their own, so that nothing of earlier ones arrives there."""
        self._start, ranks = values["start"], values["ranks"]
        self._alive_s = min(ALIVE_S, values["alive_s"])
        own = self._folder / str(self._start)
        own.mkdir(mode=0o700)
        self._store = StoreRelay(own, self._start, self._tell)
        self._commands = CommandRelay(own, len(ranks), self._address, self._shown, self._memory_fd)
        if self._is_for_others(values):
            self._workers, self._is_warm = _workers_of(values), False
            self._pipes = pipes = WorkerPipes(ranks, self._tell)
            inherited = [pipes.pid_fd, self._memory_fd, *(fd for pair in pipes.streams.values() for fd in pair)]
            environment = {**self._environment, **values["environment"]}
            self._warm = WarmProgram(own, values["imports"], environment, inherited, self._say_warm)

    def _is_for_others(self, values: Mapping[str, Any]) -> bool:
        """Returns whether workers that are asked for are other ones than those that what runs here can fork."""
        return _workers_of(values) != self._workers

    def _say_warm(self) -> None:
        self._is_warm = True
        self._tell("warm")

    def _begin_again(self, values: Mapping[str, Any]) -> None:
        """Ends the workers, and lets others in. Sent files and copies stay, and what forks workers of these ranks."""
        assert self._pipes is not None and self._warm is not None, "by `_prepare`"
        assert self._store is not None and self._commands is not None, "by `_prepare`"
        self._commands.close()
        self._store.close()
        kept = None if self._is_for_others(values) else self._warm.pid
        deadline_s = time.monotonic() + _END_S
        while end_descendants(kept):
            if time.monotonic() > deadline_s:
                self._end()
            time.sleep(_END_POLL_S)
        if not self._pipes.await_ends(_END_S):
            self._end()
        if kept is None:
            self._pipes.close()
        if self._copies is not None and values["copies"] != self._copies.num_workers:
            self._copies.for_others(values["copies"], values["kept"])
        self._let_workers_in(values)
        self._say_serving(self._serves_at)
        if self._is_warm:  # the controller may not have asked for these before
            self._tell("warm")

    def _say_serving(self, address: str) -> None:
        assert self._pipes is not None and self._warm is not None, "by `_prepare`"
        assert self._store is not None and self._commands is not None, "by `_prepare`"
        self._serves_at = address
        serving = Serving(
            address=address,
            pid_fd=self._pipes.pid_fd,
            streams={str(rank): pair for rank, pair in self._pipes.streams.items()},
            store=self._store.path,
            warm=(self._warm.path, str(os.getpid())),
            memory_fd=self._memory_fd,
            commands=self._commands.path,
            commands_port=self._commands.port,
            copies=() if self._copies is None else self._copies.files,
        )
        self._tell("serving", start=self._start, **asdict(serving))

    # -- the end ---------------------------------------------------------------------------------------------------

    def _look_after_controller(self) -> None:
        usage = WorkerUsage()
        while time.monotonic() - self._heard_s < SILENCE_S:
            time.sleep(self._alive_s)
            commands, copies, start = self._commands, self._copies, self._start
            pids = {} if self._pipes is None else self._pipes.pids
            seen = {**usage.look(pids), "room_for_copies": free_memory() if copies is None else copies.room()}
            self._tell("alive", usage=seen, sights={} if commands is None else self._sights.look(pids, commands, start))
        self._end()

    def _end(self) -> None:
        """Ends the workers, all that they started, and this process; what they printed is passed on before."""
        end_descendants()
        if self._pipes is not None:
            pipes, self._pipes = self._pipes, None
            pipes.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)  # the engine's threads would go on after `sys.exit`


def _workers_of(values: Mapping[str, Any]) -> tuple[list[int], str]:
    """Returns what of a start decides which warm parent can fork its workers: other variables each worker gets anew."""
    return values["ranks"], values["environment"].get("OMP_NUM_THREADS", "")


def main() -> None:
    """Serves one controller, whose messages come from standard input and whose answers go to standard output."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no message
    RemoteAgent(Channel(os.fdopen(os.dup(0), "rb"), os.fdopen(answers, "wb"))).run()


if __name__ == "__main__":
    main()
