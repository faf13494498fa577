"""A number for every state that a model's settings have been in: what is known of its calls is kept by that number.

Controller and workers count for themselves. Scripts switch adapters off and on again at every step: a state that comes
back has the number that it had, so that nothing has to be found out anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import count
from typing import Any

_MAX_STATES = 4096  # of a script that sets another value at every step: old states are forgotten, not numbers


class Settings:
    """Settings that changed since the model was made.

    Attributes:
        number: The number of the present state of the settings.

    Example:
        >>> settings = Settings()
        >>> [settings.set({"adapter": on}) for on in (False, True, False)]
        [1, 2, 1]
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Hashable] = {}
        self._numbers: dict[int, int] = {}
        self._next = count(1)
        self.number = 0

    def set(self, changes: Mapping[Any, Hashable]) -> int:
        """Some settings have new values; returns the number of the state that they make with all others."""
        self._values.update(changes)
        state = hash(frozenset(self._values.items()))
        if state not in self._numbers:
            if len(self._numbers) >= _MAX_STATES:
                self._numbers.clear()
            self._numbers[state] = next(self._next)
        self.number = self._numbers[state]
        return self.number

    def held(self) -> tuple[dict[Hashable, Hashable], int, int]:
        """Returns the state that the settings are in, for another process; other states are numbered anew there."""
        last = max(self._numbers.values(), default=0)
        return dict(self._values), self.number, last

    def put_back(self, held: tuple[dict[Hashable, Hashable], int, int]) -> None:
        """Takes over what `held` has returned in another process."""
        self._values, self.number, last = held
        self._numbers = {hash(frozenset(self._values.items())): self.number} if self.number else {}
        self._next = count(last + 1)
