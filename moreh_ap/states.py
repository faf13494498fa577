"""The states of an accelerator, of its session and of a model on it, and which may follow which.

Knows nothing of what is done in a state: whoever owns a `StateMachine` enters states, others look at `current`.
"""

from __future__ import annotations

import enum
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

State = TypeVar("State", bound=enum.Enum)


class AcceleratorState(enum.Enum):
    """How far the workers of an accelerator are."""

    STARTING = "worker processes start and join each other; commands wait for them"
    READY = "every worker executes commands"
    CLOSED = "the workers have ended, and cuda means again what it did"


class SessionState(enum.Enum):
    """Whether other workers could take over."""

    EMPTY = "no model has been laid out, or only small copies for trials"
    REPLAYABLE = "the journal has everything that the workers were told since the first model"
    UNREPLAYABLE = "the workers hold values that are nowhere else: an optimizer step is through, or too much was sent"


class ModelPhase(enum.Enum):
    """Whether the workers' model is that of the script."""

    CURRENT = "the workers have its modules, parameters and hooks"
    OUTDATED = "the script has added or replaced some since: the next call lays the model out again"
    DIVIDED = "some of its parameters have left it for another model or another device"
    RELEASED = "the workers have forgotten it"


AFTER: dict[enum.Enum, frozenset[enum.Enum]] = {
    AcceleratorState.STARTING: frozenset({AcceleratorState.READY, AcceleratorState.CLOSED}),
    # Workers that ran out of memory are replaced by others.
    AcceleratorState.READY: frozenset({AcceleratorState.STARTING, AcceleratorState.CLOSED}),
    AcceleratorState.CLOSED: frozenset(),
    SessionState.EMPTY: frozenset({SessionState.REPLAYABLE}),
    SessionState.REPLAYABLE: frozenset({SessionState.UNREPLAYABLE}),
    SessionState.UNREPLAYABLE: frozenset({SessionState.REPLAYABLE}),  # every model has left, and another one comes
    ModelPhase.CURRENT: frozenset({ModelPhase.OUTDATED, ModelPhase.DIVIDED, ModelPhase.RELEASED}),
    ModelPhase.OUTDATED: frozenset({ModelPhase.DIVIDED, ModelPhase.RELEASED}),
    ModelPhase.DIVIDED: frozenset({ModelPhase.RELEASED}),
    ModelPhase.RELEASED: frozenset(),
}
"""The states that may follow each state."""


class StateMachine(Generic[State]):
    """One of the states above.

    Args:
        first: The state at the beginning.

    Attributes:
        current: The present state.
    """

    def __init__(self, first: State) -> None:
        self.current = first
        self._lock = threading.Lock()
        self._when_left: dict[State, list[Callable[[], object]]] = defaultdict(list)

    def enter(self, state: State, only_from: State | None = None) -> bool:
        """Go to `state`; nothing happens where it is the state already. Any thread may call this.

        Args:
            state: Where to go.
            only_from: Without this state as the present one, nothing happens either.

        Returns:
            Whether the state has changed.

        Raises:
            RuntimeError: `state` may not follow the present one.
        """
        with self._lock:
            if state is self.current or only_from not in (None, self.current):
                return False
            if state not in AFTER[self.current]:
                raise RuntimeError(f"{self.current} cannot be followed by {state}")
            callbacks = self._when_left.pop(self.current, [])
            self.current = state
        for callback in callbacks:
            callback()
        return True

    def when_left(self, state: State, callback: Callable[[], object]) -> None:
        """Call `callback` once, when `state` is left; at once if it is not the state now."""
        with self._lock:
            if self.current is state:
                self._when_left[state].append(callback)
                return
        callback()
