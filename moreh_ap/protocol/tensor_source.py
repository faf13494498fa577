"""Where values lie that are still to be read. Apart from `loading`, so that naming a place costs no heavy import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSource:
    """Where the value of one tensor lies, or that of a box cut out of it.

    Attributes:
        file: Path of a safetensors file that this worker can read.
        key: Name of the tensor in it.
        start: Where the box begins in the whole tensor, dim by dim; empty if it is the whole tensor.
        size: How long the box is, dim by dim.
    """

    file: str
    key: str
    start: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
