"""Gradients of a call's tensor arguments that a backward leaves on the workers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moreh_ap.device.values import Value
from moreh_ap.protocol.messages.calls import ReadInputGradients
from moreh_ap.protocol.messages.tensors import LeafReply
from moreh_ap.session.session import Session


class CallWithInputs(Protocol):
    """The interface of a call that its input gradients need."""

    id: int
    input_gradients: set[Value]

    @property
    def session(self) -> Session: ...


class Kept:
    """Keeps a call on the workers. Held by all that may ask them for more of the call than its answer has."""


class InputGradient(Value):
    """The gradient of one tensor argument of a call; a backward left it on the workers."""

    __slots__ = ("_kept", "_seen", "call", "index")

    def __init__(self, call: CallWithInputs, index: int, kept: Kept | None) -> None:
        self.call, self.index, self._kept = call, index, kept
        self._seen: Tensor | None = None
        call.input_gradients.add(self)

    def ready(self) -> bool:
        return self._seen is not None

    def read(self) -> Tensor:
        if self._seen is None:
            replies = self.call.session.outbox.submit(ReadInputGradients(self.call.id, self.index)).result()
            self._seen = LeafReply.join([reply for reply in replies if reply is not None])
        return self._seen
