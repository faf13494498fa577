"""What an agent of another host says once its engine listens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Serving:
    """Where everything of a host is that its workers are told.

    Attributes:
        address: Where the engine listens, with the random name that a controller needs to know.
        pid_fd: Descriptor to which a worker writes its process id.
        streams: Descriptors of the output of each worker, by its rank.
        store: Socket of the store.
        warm: What a client is told: socket of the warm parent, and process id of the agent.
        memory_fd: Descriptor of the memory that the host's workers share.
        commands: Socket of commands.
        commands_port: Port at which the host takes them.
        copies: Slots of memory of the agent, for copies of what workers hold: process, descriptor and name of each.
    """

    address: str
    pid_fd: int
    streams: Mapping[str, Sequence[int]]
    store: str
    warm: Sequence[str]
    memory_fd: int
    commands: str
    commands_port: int
    copies: Sequence[tuple[int, int, str, int]] = ()
