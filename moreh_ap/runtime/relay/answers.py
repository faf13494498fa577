"""Answers of many workers on their way to one message.

Decides when all have answered, and that equal answers travel once. Must not know what they say.
"""

from __future__ import annotations

from collections.abc import Sequence


class JoinedAnswers:
    """The answers to one command, from sources of which each answers for one worker or for several.

    Args:
        counts: For how many workers each source answers.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts
        self._found: list[list[bytes]] = [[]] * len(counts)
        self._left = len(counts)

    def take(self, source: int, parts: list[bytes]) -> bool:
        """Takes the answer of a source; returns whether all are in. One thread at a time calls it.

        Args:
            source: Its index.
            parts: One for each worker in their order, or a single one if all are equal.
        """
        self._found[source] = parts
        self._left -= 1
        return self._left == 0

    def parts(self) -> list[bytes]:
        """Returns the answers of all workers in their order, or a single one if all are equal."""
        first = self._found[0][0]
        if all(part == first for parts in self._found for part in parts):
            return [first]
        joined: list[bytes] = []
        for parts, count in zip(self._found, self._counts):
            joined += parts * count if len(parts) < count else parts
        return joined
