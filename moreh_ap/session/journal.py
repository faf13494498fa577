"""The commands since a model's values were last outside the workers, so that they can be replayed.

Decides which commands are recorded, and until when. Must not know why they are replayed, nor on which workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch.utils._pytree import tree_leaves

from moreh_ap.protocol.messages.calls import Differentiate, Forward, TakeGradients
from moreh_ap.protocol.messages.row_shards import RunOnRowShards
from moreh_ap.protocol.messages.state import RunOperation
from moreh_ap.protocol.messages.tensors import OutputRef, TensorData
from moreh_ap.states import SessionState, StateMachine

_MOST_COMMANDS = 1024
_MOST_BYTES = 1 << 28
"""Limit for tensors in recorded commands; a script that sends more before its first step has no journal."""


@dataclass(frozen=True)
class Message:
    """The commands of one message, and the promises of the leading ones."""

    commands: tuple[Any, ...]
    posted: tuple[Any, ...]


class Journal:
    """Messages in order, while the session is `SessionState.REPLAYABLE`; empty otherwise.

    Args:
        state: The state of the session.

    The state may be left in the thread that receives answers, so nothing here waits.
    """

    def __init__(self, state: StateMachine[SessionState]) -> None:
        self.state = state
        self._messages: list[Message] = []
        self._num_commands = self._num_bytes = 0

    @property
    def is_bound_to_layout(self) -> bool:
        """Whether a command depends on how tensors are sharded, which differs between plans."""
        return any(_counts_on_layout(command) for message in self._messages for command in message.commands)

    @property
    def passes_outputs_on(self) -> bool:
        """Whether a call was given an output that workers kept, which was decided by their number."""
        return any(_takes_outputs(command) for message in self._messages for command in message.commands)

    @property
    def differentiates_gradients(self) -> bool:
        """Whether a command needs the full model and a call's activations on every worker."""
        return any(isinstance(command, Differentiate) for message in self._messages for command in message.commands)

    def messages(self) -> tuple[Message, ...]:
        """Returns the recorded messages, oldest first."""
        return tuple(self._messages)

    def changed(self, change: Callable[[Any], Any]) -> list[tuple[list[Any], list[Any]]]:
        """Returns commands and promises of the recorded messages, each command changed."""
        return [([change(one) for one in message.commands], list(message.posted)) for message in self._messages]

    def open(self) -> None:
        """Starts recording, after dropping earlier records: the workers have no model of the script yet."""
        if self.state.current is SessionState.REPLAYABLE:
            self.state.enter(SessionState.UNREPLAYABLE)
        self.state.enter(SessionState.REPLAYABLE)
        self.state.when_left(SessionState.REPLAYABLE, self._forget)

    def _forget(self) -> None:
        self._messages, self._num_commands, self._num_bytes = [], 0, 0

    def note(self, commands: tuple[Any, ...], posted: tuple[Any, ...]) -> None:
        """Records a message that is about to be sent; only while the session is replayable."""
        self._num_commands += len(commands)
        self._num_bytes += sum(map(_num_bytes, commands))
        if self._num_commands > _MOST_COMMANDS or self._num_bytes > _MOST_BYTES:
            self.state.enter(SessionState.UNREPLAYABLE)
        else:
            self._messages.append(Message(commands, posted))


def _num_bytes(command: Any) -> int:
    leaves = tree_leaves([getattr(command, field.name) for field in fields(command)])
    return sum(len(leaf.data) for leaf in leaves if isinstance(leaf, TensorData))


def _counts_on_layout(command: Any) -> bool:
    return _takes_outputs(command) or isinstance(command, (RunOperation, RunOnRowShards, TakeGradients))


def _takes_outputs(command: Any) -> bool:
    return isinstance(command, Forward) and any(isinstance(tensor, OutputRef) for tensor in command.tensors)
