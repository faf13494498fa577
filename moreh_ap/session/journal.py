"""What workers were told since a model's values were last outside them, so that the same can be told again.

Decides what is noted, and until when. Must not know why anything is told again, nor to whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch.utils._pytree import tree_leaves

from moreh_ap.protocol.messages.calls import Differentiate, Forward, TakeGradients
from moreh_ap.protocol.messages.row_shards import RunOnParts
from moreh_ap.protocol.messages.state import RunOperation
from moreh_ap.protocol.messages.tensors import OutputRef, TensorData

_MOST_COMMANDS = 1024
_MOST_BYTES = 1 << 28
"""Of tensors in noted commands: whoever evaluates for long, or sends much, before the first step trains on without."""


@dataclass(frozen=True)
class Message:
    """Commands that left together, and the promises of the results of the first of them."""

    commands: tuple[Any, ...]
    posted: tuple[Any, ...]


class Journal:
    """Messages in order. Closed at first; once closed it is empty.

    Attributes:
        is_open: Whether everything since `open` is here.

    Closing may happen in the thread that receives answers, so it never waits.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._whenever_closed: list[Callable[[], object]] = []
        self.is_open = False
        self._num_commands = self._num_bytes = 0

    @property
    def is_bound_to_layout(self) -> bool:
        """Whether a command counts on how workers share tensors, which differs between plans."""
        return any(_counts_on_layout(command) for message in self._messages for command in message.commands)

    @property
    def differentiates_gradients(self) -> bool:
        """Whether a command needs, on each worker, the whole model and what a call computed."""
        return any(isinstance(command, Differentiate) for message in self._messages for command in message.commands)

    def messages(self) -> tuple[Message, ...]:
        """Everything noted, oldest first."""
        return tuple(self._messages)

    def open(self) -> None:
        """Note from now on, and forget what was noted before."""
        self.close()
        self.is_open = True

    def close(self) -> None:
        """Note no more: what was noted cannot, or need not, be told again."""
        self.is_open = False
        self._messages, self._num_commands, self._num_bytes = [], 0, 0
        callbacks, self._whenever_closed = self._whenever_closed, []
        for callback in callbacks:
            callback()

    def when_closed(self, callback: Callable[[], object]) -> None:
        """Call `callback` once nothing is told again any more: at the next closing, or at once."""
        if self.is_open:
            self._whenever_closed.append(callback)
        else:
            callback()

    def note(self, commands: tuple[Any, ...], posted: tuple[Any, ...]) -> None:
        """A message is about to leave; only while the journal is open."""
        self._num_commands += len(commands)
        self._num_bytes += sum(map(_num_bytes, commands))
        if self._num_commands > _MOST_COMMANDS or self._num_bytes > _MOST_BYTES:
            self.close()
        else:
            self._messages.append(Message(commands, posted))


def _num_bytes(command: Any) -> int:
    leaves = tree_leaves([getattr(command, field.name) for field in fields(command)])
    return sum(len(leaf.data) for leaf in leaves if isinstance(leaf, TensorData))


def _counts_on_layout(command: Any) -> bool:
    if isinstance(command, Forward):
        return any(isinstance(tensor, OutputRef) for tensor in command.tensors)
    return isinstance(command, (RunOperation, RunOnParts, TakeGradients))
