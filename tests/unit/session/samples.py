"""Commands of a session, and workers that note them."""

from __future__ import annotations

import torch

from moreh_ap.protocol.messages.calls import Forward
from moreh_ap.protocol.messages.stream import Batch


class Answer:
    """A reply that is there at once: one worker's results, or an error."""

    def __init__(self, commands, error=None):
        self.commands, self.error = commands, error

    def done(self):
        return True

    def exception(self):
        return self.error

    @property
    def group(self):
        return self

    def answers(self, reply):
        if self.error is not None:
            raise self.error
        return [[f"{type(command).__name__}" for command in self.commands]]

    def let_go(self, reply):
        pass

    def add_done_callback(self, callback):
        callback(self)


class Workers:
    """Stands for a mesh: notes what it is told; the message of number `fails_at` fails."""

    keeps_commands = keeps_values = False
    wanted = None

    def __init__(self, fails_at=None):
        self.told, self.fails_at = [], fails_at

    def submit(self, batch: Batch):
        self.told.append(batch.commands)
        error = torch.OutOfMemoryError("no memory") if len(self.told) - 1 == self.fails_at else None
        return Answer(batch.commands, error)


def forward(*tensors):
    return Forward(1, 2, tensors, None, (False,) * len(tensors), True, 0, None, None, None, ())
