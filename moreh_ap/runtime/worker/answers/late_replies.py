"""Small values of a GPU that an answer takes along.

Decides where such a value is until it is sent, and that whoever packs the answer waits for it.

[Note: answers of a GPU]
A loss travels with the answer to its forward. Reading it from the GPU waits until the forward is computed, and a
worker that waits puts nothing into the GPU's queue, which would run dry in every step. So the copy into pinned memory
is queued behind the forward, the worker goes on with the next command, and another thread (`answering_thread.py`)
packs the answer, for which it waits until the copy has been made. Answers leave in the order of their commands.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from moreh_ap.protocol.messages.tensors import LeafReply, bytes_of

_FIELDS = [field.name for field in fields(LeafReply)]


@dataclass(frozen=True)
class LateReply(LeafReply):
    """A reply whose value is on its way from a GPU; pickled, it is the `LeafReply` with the value's bytes.

    Attributes:
        host: Pinned memory that gets the value.
        arrived: Comes once it has it.
    """

    host: Tensor | None = None
    arrived: torch.cuda.Event | None = None

    @staticmethod
    def of(reply: LeafReply, value: Tensor) -> LateReply:
        """Returns a reply with a value of the GPU, which is sent in the reply's dtype, its dims in the usual order."""
        host = torch.empty(value.shape, dtype=reply.dtype, pin_memory=True)
        host.copy_(value.detach().to(reply.dtype), non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)
        arrived.record()
        return LateReply(*[*_values(reply), host, arrived])

    def __reduce__(self) -> tuple[Any, ...]:
        """Waits for the value."""
        assert self.host is not None and self.arrived is not None
        self.arrived.synchronize()
        return LeafReply, tuple(_values(replace(self, data=bytes_of(self.host))))


def _values(reply: LeafReply) -> list[Any]:
    return [getattr(reply, name) for name in _FIELDS]
