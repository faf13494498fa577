"""A split region: from the layers that turn a replicated input into parts to the one whose output is partial.

Decides what happens at both ends: which crossing, and whose random numbers. Must not know which layers these are.

[Note: one entry for one input]
q, k and v take the same tensor. It enters once: their gradients add up here before one all-reduce sums them over the
ranks. The region keeps the last tensor that entered until its output leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moreh_ap.parallelizer.rng.policy import OwnStream
from moreh_ap.parallelizer.tensor.crossing import Crossing


@dataclass
class SequenceState:
    """Whether hidden states are split along the sequence at this point of the forward.

    Attributes:
        length: Length of the whole sequence while they are, None while they are whole.
        stream: The stream of random numbers of this rank's tokens, where blocks drop something.
    """

    length: int | None = None
    stream: OwnStream | None = None


@dataclass
class Region:
    """The state of one split region between its two ends.

    Attributes:
        crossing: The ranks.
        sequence: Shared by all regions of a model.
        draws: Says whether something in the region draws random numbers.
    """

    crossing: Crossing
    sequence: SequenceState
    draws: Callable[[], bool]
    _entered: tuple[Tensor, int, bool, Tensor] | None = field(default=None, repr=False)
    _stream: OwnStream | None = field(default=None, repr=False)

    def enter(self, hidden: Tensor) -> Tensor:
        """Returns the input of a layer that splits: whole, with partial gradients. See [Note: one entry for one input].

        Args:
            hidden: (..., tokens, features): whole, or this rank's tokens where the sequence is split.
        """
        key = (hidden._version, torch.is_grad_enabled())
        if self._entered is not None and self._entered[0] is hidden and self._entered[1:3] == key:
            return self._entered[3]
        if self.sequence.length is not None:
            entered = self._gather(hidden, self.sequence.length)
        else:
            entered = self.crossing.enter(hidden)
            if self._stream is None and self.draws():
                self._stream = OwnStream(self.crossing.rank, hidden.device)
        self._entered = (hidden, *key, entered)
        return entered

    def counts_as(self, hidden: Tensor, entered: Tensor) -> None:
        """Makes `enter(hidden)` return `entered` until the region is left."""
        self._entered = (hidden, hidden._version, torch.is_grad_enabled(), entered)

    def leave(self, partial: Tensor) -> Tensor:
        """Returns the sum over ranks: whole, or this rank's tokens of it where the sequence is split."""
        self.close()
        length = self.sequence.length
        if length is None:
            return self.crossing.leave(partial)
        own = self.crossing.leave_split(partial.reshape(-1, length, partial.shape[-1]), 1)
        return own if partial.ndim == 3 else own.flatten(0, 1)

    def close(self) -> None:
        """Goes back to the common random numbers and forgets what entered."""
        self._entered = None
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.swap()

    def _gather(self, hidden: Tensor, length: int) -> Tensor:
        start, stop = self.crossing.shard_range(length)
        tokens = hidden.reshape(-1, stop - start, hidden.shape[-1])
        gathered = self.crossing.gather_into(tokens, 1, length)
        return gathered if hidden.ndim == 3 else gathered.flatten(0, 1)
