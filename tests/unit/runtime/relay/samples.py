"""Hosts whose agents and workers are threads of this process."""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import contextmanager

from moreh_ap.hosts.certificates import make_credentials
from moreh_ap.hosts.credentials import context_of
from moreh_ap.protocol.encoding import pack
from moreh_ap.runtime.relay.command_links import CommandLinks
from moreh_ap.runtime.relay.command_relay import CommandRelay
from moreh_ap.runtime.relay.command_socket import CommandSocket
from moreh_ap.runtime.relay.worker_answer import Answer
from moreh_ap.runtime.relay.written_answers import written_other, written_result
from moreh_ap.runtime.shared_memory import make_host_memory

HERE = "127.0.0.1"


class Run:
    """Relays of some hosts, and what connects to them.

    Args:
        folder: For their sockets.
        num_hosts: Hosts.
        per_host: Workers of each.
        most: Hosts that one talks to at most.
    """

    def __init__(self, folder, num_hosts: int, per_host: int, most: int) -> None:
        self.most = most
        self.files = make_credentials([HERE])[HERE].as_files()
        self.memories = [make_host_memory() for _ in range(num_hosts)]
        self.relays, self.ended = [], []
        for host, memory in enumerate(self.memories):
            own = folder / f"host{host}"
            own.mkdir()
            self.relays.append(CommandRelay(own, per_host, HERE, self.files, memory))
        self.sockets = [CommandSocket(relay.path, index) for relay in self.relays for index in range(per_host)]
        self.per_host, self._links = per_host, None

    @property
    def links(self) -> CommandLinks:
        """The controller's connections."""
        if self._links is None:
            self._links = self.connected(context_of(self.files, is_server=False))
        return self._links

    def connected(self, context) -> CommandLinks:
        """Returns connections that show something else."""
        places = [(HERE, relay.port) for relay in self.relays]
        return CommandLinks(places, self.per_host, context, lambda *host: self.ended.append(host), self.most)

    def serve(self, answer) -> None:
        """Has every worker answer commands with `answer(rank, number, command)`: a status and a result."""

        def run(rank, connection):
            while (frame := connection.receive()) is not None:
                status, result = answer(rank, frame.number, pickle.loads(frame.parts[0]))
                is_done = status == "done"
                parts = written_result(result) if is_done else written_other(Answer(status, pack(result)))
                connection.answer(frame, parts, has_failed=status == "failed")

        for rank, connection in enumerate(self.sockets):
            threading.Thread(target=run, args=(rank, connection), daemon=True).start()

    def close(self) -> None:
        if self._links is not None:
            self._links.close()
        for one in self.sockets:
            one._plain.close()
        for memory in self.memories:
            os.close(memory)


@contextmanager
def running(folder, num_hosts=2, per_host=2, most=4):
    """Gives a `Run`."""
    made = Run(folder, num_hosts, per_host, most)
    try:
        yield made
    finally:
        made.close()
