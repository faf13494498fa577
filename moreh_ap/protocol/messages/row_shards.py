"""Large tensors of which each worker holds its rows: operations on them, where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moreh_ap.protocol.messages.tensors import TensorData


@dataclass(frozen=True)
class RunOnParts:
    """Run an ATen operation on parts of large tensors; results are kept under the numbers in `outputs`.

    In the arguments stand `PartRef`, `OutputRef`, `RowsOf`, `Expanded`, `NumRows` and `TensorData`. With `sums` results
    are summed over the workers that share the batch, and whole after that. Answers a `LeafReply` for each result that
    is whole and small, None for others; None in all from a worker that does not speak.
    """

    func: str
    arguments: Any
    keyword_arguments: Any
    outputs: tuple[int, ...]
    sums: bool


@dataclass(frozen=True)
class ReadPart:
    """Answer a `LeafReply` with this worker's part of a tensor; None from a worker that does not speak."""

    number: int


@dataclass(frozen=True)
class WritePart:
    """Set a tensor of which workers hold parts."""

    number: int
    whole: TensorData


@dataclass(frozen=True)
class ReleaseParts:
    """Forget these tensors."""

    numbers: tuple[int, ...]
