"""What a worker answers to one command, and how the engine carries it.

Must not know what commands mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moreh_ap.protocol.encoding import Packed

DONE, FAILED, SKIPPED = "done", "failed", "skipped"


class Answer(NamedTuple):
    """What a worker answers to one command.

    Attributes:
        status: DONE, FAILED or SKIPPED.
        content: the result, or the `Failure`; None when skipped.
    """

    status: str
    content: Packed | None


# Plain tuples on the way: the engine's pickler takes 7-14 us longer over each object of a class of ours.
Wire = tuple[str, "tuple[Any, ...] | None"]


def to_wire(answer: Answer) -> Wire:
    """Returns an answer as it travels."""
    return answer.status, None if answer.content is None else tuple(answer.content)


def from_wire(wire: Wire) -> Answer:
    """Returns the answer that `to_wire` was given."""
    status, content = wire
    return Answer(status, None if content is None else Packed(*content))
